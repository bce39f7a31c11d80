"""The bill of materials: every package once, with the hash of the file that was installed."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from clustertune.containers import build
from clustertune.containers.lock import LockedPackage, PackageLock
from clustertune.containers.wheelhouse import Wheel

LOCK = PackageLock("train", "3.12", "x86_64-manylinux_2_28", "2030-01-31", {})
WHEELS = [
    Wheel(LockedPackage("kiln", "2.0+cpu", ("a" * 64,)), Path("k.whl"), "a" * 64),
    Wheel(LockedPackage("pan", "1", ("c" * 64,)), Path("p.whl"), "b" * 64, "c" * 64),
]
INVENTORY = {
    "python": [
        {"name": "kiln", "version": "2.0+cpu", "expression": "MIT OR Zlib", "license": "", "requires": ["pan", "none"]},
        {"name": "pan", "version": "1", "expression": "", "license": "BSD License", "requires": []},
    ],
    "system": [["libc6", "2.36-9+deb12u1", "amd64"]],
    "distribution": "debian",
    "release": "12",
}  # fmt: skip
NOW = datetime(2030, 1, 31, tzinfo=UTC)


def test_what_scanners_read() -> None:
    """Names as package URLs, hashes, licences, who asks for whom."""
    document = build.bill_of("train.sif", LOCK, WHEELS, INVENTORY, "stand-in bookworm", NOW)
    assert (document["bomFormat"], document["specVersion"], document["version"]) == ("CycloneDX", "1.6", 1)
    kiln, pan, libc = document["components"]
    assert kiln["purl"] == "pkg:pypi/kiln@2.0%2Bcpu" and kiln["hashes"] == [{"alg": "SHA-256", "content": "a" * 64}]
    assert kiln["licenses"] == [{"expression": "MIT OR Zlib"}] and pan["licenses"] == [{"license": {"name": "BSD License"}}]
    assert pan["properties"] == [{"name": "clustertune:built-from-sha256", "value": "c" * 64}]
    assert libc["purl"] == "pkg:deb/debian/libc6@2.36-9%2Bdeb12u1?arch=amd64&distro=debian-12"
    refs = [component["bom-ref"] for component in document["components"]]
    asks = {item["ref"]: item["dependsOn"] for item in document["dependencies"]}
    assert asks[kiln["bom-ref"]] == [pan["bom-ref"]] and sorted(asks["image:train.sif"]) == sorted(refs) and len(set(refs)) == 3


@pytest.mark.parametrize("change", ["gone", "strange"])
def test_an_image_that_is_not_what_was_locked_gets_none(change: str) -> None:
    """A bill that leaves out a package is worse than none."""
    python = (
        INVENTORY["python"][:1] if change == "gone" else [*INVENTORY["python"], {**INVENTORY["python"][0], "name": "guest"}]
    )
    with pytest.raises(ValueError, match="pan" if change == "gone" else "guest"):
        build.bill_of("train.sif", LOCK, WHEELS, {**INVENTORY, "python": python}, "x", NOW)
