"""What pyproject.toml cannot say: configs/ is packaged as megatron_dsv.configs, beside the discovered packages."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["megatron_dsv*"]), "megatron_dsv.configs"],
    package_dir={"megatron_dsv.configs": "configs"},
    package_data={"megatron_dsv.configs": ["*/*.yaml"]},
)
