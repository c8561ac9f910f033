"""Jobs of a Ray cluster: submit ``train.py``, follow, list and stop; launch scripts for Slurm and Kubernetes."""
