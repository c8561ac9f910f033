"""Package definition: version ranges of dependencies, and entry points. scripts/requirements/*.lock has the exact versions."""

from pathlib import Path

from setuptools import find_packages, setup

CONFIGS = [str(path) for path in sorted(Path("configs").rglob("*.yaml"))]

setup(
    name="slime-like",
    version="0.1.0",
    description="GRPO post-training of large language models with Ray, megatron-core and SGLang, on CPU and GPU alike",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The slime_like authors",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["reinforcement learning", "large language models", "GRPO", "RLHF", "Megatron", "SGLang", "Ray"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.12,<3.13",
    packages=[
        *find_packages(include=["slime_like", "slime_like.*", "slime_like_compat", "slime_like_compat.*"]),
        *find_packages(where="plugins"),
    ],
    package_dir={
        "slime_like": "slime_like",
        "slime_like_compat": "slime_like_compat",
        "slime_like_plugins": "plugins/slime_like_plugins",
    },
    package_data={
        "slime_like": ["py.typed"],
        "slime_like_compat": ["py.typed", "*.tsv"],
        "slime_like_plugins": ["py.typed"],
        "slime_like.config.rules": ["upstream/*.json"],
        "slime_like.phantom": ["csrc/*.c", "csrc/*.h", "csrc/crt/*.h"],  # compiled where it runs
        "slime_like.distributed.wrapper": ["csrc/*.c", "csrc/*.h"],  # compiled where it runs
        "slime_like_plugins.megatron_cpu": ["csrc/*.c", "csrc/*.h"],  # compiled where it runs
        "slime_like_plugins.sglang_cpu": ["csrc/*.c", "csrc/*.h"],  # compiled where it runs
    },
    # slime_like.config.load.paths searches this folder outside a checkout.
    data_files=[(f"share/slime_like/{Path(path).parent}", [path]) for path in CONFIGS],
    install_requires=[
        "torch>=2.14,<2.15",
        "sglang==0.5.23",
        "megatron-core==0.19.2",
        "transformers>=5.19,<6",
        "ray[default]>=2.60,<3",
        "hydra-core>=1.3.8,<2",
        "numpy",
        "datasets",
        "safetensors",
        "msgspec",
        "pydantic>=2.14,<3",
        "rich",
        "tenacity",
        "math-verify",
    ],
    extras_require={"wandb": ["wandb"], "tensorboard": ["tensorboard"], "docs": ["mkdocs-material>=9.7,<10"]},
    entry_points={
        "sglang.srt.platforms": ["slime_like_cpu = slime_like_plugins.sglang_cpu:activate"],
        "sglang.srt.plugins": [
            "slime_like_cpu = slime_like_plugins.sglang_cpu:load",
            "slime_like_dcp = slime_like_plugins.dcp:load",
            "slime_like_flow_mla = slime_like_plugins.flow_mla:load",
            "slime_like_kv_capacity = slime_like_plugins.kv_capacity:load",
            "slime_like_remote_experts = slime_like_plugins.remote_experts:load",
            "slime_like_rollout_sampling = slime_like_plugins.rollout_sampling:load",
            "slime_like_weight_commit = slime_like_plugins.weight_commit:load",
        ],
    },
)
