"""Pip's report of an installation (on stdin) as constraints: the exact version of everything but fused8 itself."""

import json
import platform
import sys

installed = {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in json.load(sys.stdin)["install"]}
python = ".".join(platform.python_version_tuple()[:2])
print("# What `.ci/run` installs. Made by `make constraints`; pip takes it from PIP_CONSTRAINT.")
print(f"# Resolved for Python {python} on {platform.system()} {platform.machine()}.")
for name, version in sorted(installed.items()):
    if name != "fused8":
        print(f"{name}=={version.partition('+')[0]}")  # not which build of it
