"""The cores that this process may use, against the thread settings in its environment.

`hvdtrain run` shares the cores between the ranks of a host; what the user has set stays, and may be wrong here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
