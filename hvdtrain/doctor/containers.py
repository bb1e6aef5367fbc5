"""Does Docker or Podman work for this user, and can its containers use the GPUs?"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.doctor.examination import took_too_long
from hvdtrain.doctor.finding import Finding, fail, ok, skip
from hvdtrain.launch.running.bounded import Ran, run

GPU_RUNTIME = "GPUs in containers"
_QUESTIONS = {
    "docker": ["docker", "info", "--format", "{{.ServerVersion}} {{json .Runtimes}}"],
    "podman": ["podman", "info", "--format", "{{.Version.Version}}"],
}
_HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-toolkit")


def look_at_containers(
    environ: Mapping[str, str], limit: float, cdi_folders: Sequence[Path]
) -> Sequence[Finding]:
    """One line for each of docker and podman that is installed, and one for the GPUs in them.

    Args:
        cdi_folders: where descriptions of devices for containers lie.
    """
    path = environ.get("PATH")
    installed = [name for name in _QUESTIONS if shutil.which(name, path=path)]
    if not installed:
        return [skip("containers", "neither docker nor podman is installed here")]
    answers = {
        name: run(_QUESTIONS[name], limit=limit / len(installed), environ=environ)
        for name in installed
    }
    findings = [engine_finding(name, answers[name], limit) for name in installed]
    if any(finding.status == "ok" for finding in findings):
        # One is enough; clients without their engine are common.
        findings = [skip(f.name, f.seen) if f.status == "fail" else f for f in findings]
    if not shutil.which("nvidia-smi", path=path):
        return [*findings, skip(GPU_RUNTIME, "no NVIDIA GPU here")]
    return [
        *findings,
        *(_gpu_finding(name, answers[name], path, cdi_folders) for name in installed),
    ]


def engine_finding(name: str, answer: Ran | None, limit: float) -> Finding:
    if answer is None:
        return fail(name, "in PATH, but not executable", f"install {name} again")
    if answer.returncode is None:
        return took_too_long(name, limit, f"restart it: systemctl restart {name}")
    words = answer.stdout.split()
    # Old Docker clients report a missing daemon, and exit with 0.
    if answer.returncode == 0 and words and words[0][0].isdigit():
        return ok(name, f"works, version {words[0]}")
    return fail(name, answer.last_line or "does not answer", _fix_of(name, answer.text))


def _fix_of(name: str, text: str) -> str:
    lower = text.lower()
    if name == "podman":
        return "podman info --log-level=debug says why; rootless: /etc/subuid must name you, then podman system migrate"
    if "permission denied" in lower:
        return "sudo usermod -aG docker $USER, and log in again (or use podman)"
    return "start its daemon: sudo systemctl start docker (or use podman)"


def _gpu_finding(
    name: str, answer: Ran | None, path: str | None, cdi_folders: Sequence[Path]
) -> Finding:
    described = any(
        "nvidia" in file.name
        for folder in cdi_folders
        if folder.is_dir()
        for file in folder.iterdir()
    )
    if described:
        return ok(GPU_RUNTIME, f"{name}: described by CDI")
    if name == "podman":
        fix = "install nvidia-container-toolkit; sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
        return fail(GPU_RUNTIME, "podman: no CDI description of the GPUs", fix)
    hook = next((hook for hook in _HOOKS if shutil.which(hook, path=path)), None)
    if hook or (answer is not None and '"nvidia"' in answer.stdout):
        return ok(GPU_RUNTIME, f"docker: {hook or 'the nvidia runtime'}")
    fix = "install nvidia-container-toolkit; sudo nvidia-ctk runtime configure; sudo systemctl restart docker"
    return fail(GPU_RUNTIME, "docker: no NVIDIA container toolkit", fix)
