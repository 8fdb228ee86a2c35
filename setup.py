"""Names the packages: pyproject.toml cannot find sub-packages of folders that are imported under another name."""

from setuptools import find_packages, setup

FOLDERS = {"p2q": "p2q", "p2q.eval": "eval", "p2q.patches": "patches", "p2q.serve": "serve"}

setup(
    package_dir=FOLDERS,
    packages=[f"{name}.{sub}".rstrip(".") for name, folder in FOLDERS.items() for sub in ("", *find_packages(folder))],
)
