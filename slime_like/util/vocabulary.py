"""Number of rows of an embedding whose rows are divided over tensor parallel ranks."""

from __future__ import annotations

MULTIPLE = 128


def padded_vocabulary(vocab_size: int, tp: int) -> int:
    """Return the number of rows, including padding, that the trainer's embedding and output layer each have.

    It is a multiple of 128 if tp divides 128, so that checkpoints can be resharded, and a multiple of 128 * tp
    otherwise.
    """
    multiple = MULTIPLE if MULTIPLE % tp == 0 else MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple
