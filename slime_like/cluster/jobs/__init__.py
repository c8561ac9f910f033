"""Submit ``train.py`` as a job of a Ray cluster; follow, list and stop jobs; write Slurm scripts and Kubernetes manifests."""
