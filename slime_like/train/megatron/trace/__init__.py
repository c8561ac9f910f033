"""One rank of a trainer alone on a phantom GPU: its calls, its memory and its waits. Values mean nothing here."""
