"""What ``scontrol show job`` prints, in the form of Slurm 22.05.8, shortened."""

from __future__ import annotations


def job_record(job: str, name: str, state: str, command: str, nodes: str = "") -> str:
    return (
        f"JobId={job} JobName={name}\n   UserId=me(7) GroupId=me(7) MCS_label=N/A\n   Priority=1 Nice=0\n"
        f"   JobState={state} Reason=None Dependency=(null)\n   Requeue=1 Restarts=2 RunTime=1-01:00:05\n"
        f"   NodeList={nodes}\n   Command={command}\n"
    )
