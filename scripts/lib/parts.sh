# Sourced: the parts of the tests, each by the markers of pyproject.toml. Every test is in exactly one.

declare -A PARTS=(
    [unit]="not engine and not ranks and not e2e and not gpu"
    [engine]="engine and not e2e and not gpu"
    [ranks]="ranks and not engine and not e2e and not gpu"
    [e2e]="e2e and not gpu"
    [gpu]="gpu"
)
