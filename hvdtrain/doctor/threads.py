"""The cores that this process may use, against the thread settings in its environment.

`hvdtrain run` shares the cores between the ranks of a host; what the user has set stays, and may be wrong here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.doctor.finding import Finding, fail, ok, warn

SETTINGS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


def look_at_threads(
    environ: Mapping[str, str], affinity: int, quota: float | None
) -> Sequence[Finding]:
    """Cores and thread settings.

    Args:
        affinity: cores in this process's mask.
        quota: cores' worth of time that its control group grants; None without a limit.
    """
    return [cores_finding(environ, affinity, quota), settings_finding(environ, affinity)]


def cores_finding(environ: Mapping[str, str], affinity: int, quota: float | None) -> Finding:
    name = "cores"
    # Half a core more is a rounding of the container's administrator.
    if quota is None or quota + 0.5 >= affinity:
        return ok(name, f"{affinity}")
    seen = f"{affinity} in the mask, but the container grants the time of {quota:g}"
    if any(name in environ for name in SETTINGS):
        return ok(name, f"{seen}; the environment sets the threads")
    share = max(1, int(quota))
    fix = "give it whole cores (docker run --cpuset-cpus), or set the threads of a rank: "
    return warn(name, seen, fix + " ".join(f"{setting}={share}" for setting in SETTINGS))


def settings_finding(environ: Mapping[str, str], cores: int) -> Finding:
    name = "thread settings"
    given = {setting: environ[setting] for setting in SETTINGS if setting in environ}
    if not given:
        return ok(name, "none: hvdtrain run shares the cores between the ranks of a host")
    wrong = [f"{setting}={value}" for setting, value in given.items() if not value.isdecimal()]
    if wrong:
        names = " ".join(item.partition("=")[0] for item in wrong)
        return fail(name, f"no number: {', '.join(wrong)}", f"unset {names}")
    seen = ", ".join(f"{setting}={value}" for setting, value in given.items())
    # 0 lets TensorFlow take all cores, in each rank.
    if any(int(value) > cores for value in given.values()):
        return warn(name, f"{seen}: more than the {cores} cores", f"unset {' '.join(given)}")
    return ok(name, seen)


def cgroup_quota(root: Path, own: Path) -> float | None:
    """Cores' worth of time that the control groups of this process grant: the least on the way to the root.

    Args:
        root: /sys/fs/cgroup.
        own: /proc/self/cgroup.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, read = root, _read_v2
        elif "cpu" in controllers.split(","):
            base, read = root / "cpu", _read_v1
        else:
            continue
        # In a container the path may be that of the host, where the file is that of the root.
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            if place.is_relative_to(base) and (quota := read(place)) is not None:
                found.append(quota)
    return min(found, default=None)


def _read_v2(folder: Path) -> float | None:
    try:
        granted, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if granted == "max" else int(granted) / int(period)


def _read_v1(folder: Path) -> float | None:
    try:
        granted = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return None if granted < 0 else granted / period
