"""Remote experts: part of the routed experts of each layer is in the memory of a worker process, on this or another machine.

An engine sends a worker the hidden states of the tokens that were routed to its experts, computes the other experts meanwhile, and
adds both sums. After the remote expert compute of Luce-Org/lucebox (pull request 388): tokens are grouped by their number of
remote experts, and a prefill chunk takes a few large requests instead of many small ones.
"""

from __future__ import annotations

NAME = "remote_experts"
