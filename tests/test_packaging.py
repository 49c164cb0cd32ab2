"""What the package ships is what the folders hold."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("cli", "conf", "fitting", "kernels", "rl", "sweeps")


def test_every_subpackage_is_listed():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {
        "scalerl." + ".".join(init.parent.relative_to(ROOT).parts)
        for folder in FOLDERS
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert found == listed


def test_version_is_the_distributions():
    assert version("scalerl") == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_command_modules_import_nothing_heavy():
    heavy = "{'torch', 'scipy', 'pandas', 'matplotlib', 'transformers', 'hydra'}"
    code = f"import sys, scalerl.cli.main; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_arrows_between_the_folders():
    allowed = {"cli": set(FOLDERS), "sweeps": {"sweeps", "rl", "fitting"}, "rl": {"rl", "kernels"}}
    for folder in FOLDERS:
        for source in (ROOT / folder).rglob("*.py"):
            for line in source.read_text().splitlines():
                words = line.split()
                if len(words) > 1 and words[0] in ("from", "import") and words[1].startswith("scalerl."):
                    target = words[1].split(".")[1]
                    assert target in allowed.get(folder, {folder}), f"{source.relative_to(ROOT)}: {line.strip()}"
                    if (folder, target) == ("sweeps", "rl"):
                        assert words[1] in ("scalerl.rl.config", "scalerl.rl.errors"), line
