"""Submit ``train.py`` as a job of a Ray cluster; follow, list and stop jobs; write scripts for Slurm and Kubernetes."""
