"""The bill of materials beside an image: CycloneDX 1.6 as JSON.

Our own in place of cyclonedx-bom 7.5: that lists a Python environment, without the distribution's packages and without the
hash of the wheel that was installed. Images are also built where no Python package is installed yet.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

from clustertune.containers.lockfile import PackageLock
from clustertune.containers.wheelhouse import Wheel

FORMAT, VERSION = "CycloneDX", "1.6"
"""https://cyclonedx.org/docs/1.6/json/"""


def document(
    image: str, lock: PackageLock, wheels: Sequence[Wheel], inventory: Mapping[str, Any], base: str, made: datetime
) -> dict[str, Any]:
    """What the image holds: each Python package with its licence and the hash of its file, and the distribution's packages.

    ``inventory``: what ``selftest.py --inventory`` printed in the image. Raises ValueError where it is not what was installed.
    """
    by_name = {wheel.entry.name: wheel for wheel in wheels}
    if strange := sorted({item["name"] for item in inventory["python"]} ^ set(by_name)):
        raise ValueError(f"installed or locked, not both: {', '.join(strange)}")
    python = [_python(item, by_name[item["name"]]) for item in inventory["python"]]
    distribution, release = inventory["distribution"], inventory["release"]
    system = [_system(name, version, arch, distribution, release) for name, version, arch in inventory["system"]]
    refs = {component["name"]: component["bom-ref"] for component in python}
    root = f"image:{image}"
    asks = [
        {"ref": refs[item["name"]], "dependsOn": sorted(refs[name] for name in item["requires"] if name in refs)}
        for item in inventory["python"]
    ]
    properties = {"lock": lock.name, "lock.before": lock.before, "python": lock.python, "platform": lock.platform, "base": base}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": FORMAT,
        "specVersion": VERSION,
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, lock.text() + made.isoformat())}",
        "version": 1,
        "metadata": {
            "timestamp": made.isoformat(timespec="seconds"),
            "component": {
                "type": "container", "bom-ref": root, "name": image,
                "properties": [{"name": f"clustertune:{key}", "value": value} for key, value in properties.items()],
            },
        },
        "components": [*python, *system],
        "dependencies": [{"ref": root, "dependsOn": sorted([*refs.values(), *(item["bom-ref"] for item in system)])}, *asks],
    }  # fmt: skip


def _python(item: Mapping[str, Any], wheel: Wheel) -> dict[str, Any]:
    name, version = item["name"], item["version"]
    purl = f"pkg:pypi/{quote(name)}@{quote(version, safe='.')}"
    component: dict[str, Any] = {
        "type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl,
        "hashes": [{"alg": "SHA-256", "content": wheel.digest}],
    }  # fmt: skip
    if item["expression"]:
        component["licenses"] = [{"expression": item["expression"]}]
    elif item["license"]:
        component["licenses"] = [{"license": {"name": item["license"]}}]
    if wheel.source:
        component["properties"] = [{"name": "clustertune:built-from-sha256", "value": wheel.source}]
    return component


def _system(name: str, version: str, arch: str, distribution: str, release: str) -> dict[str, Any]:
    where = f"arch={quote(arch)}&distro={quote(distribution)}-{quote(release)}"
    purl = f"pkg:deb/{quote(distribution)}/{quote(name)}@{quote(version, safe='.')}?{where}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
