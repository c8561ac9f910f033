"""Submit ``train.py`` as a job of a Ray cluster; follow, list and stop jobs; launch scripts for Slurm and Kubernetes."""
