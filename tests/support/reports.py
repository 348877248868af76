"""Made-up reports on jobs that hang."""

from __future__ import annotations

from msgspec.structs import replace

from phalanx.diagnosis.diagnose import HangDiagnosis
from phalanx.diagnosis.report import HangReport
from phalanx.diagnosis.snapshot import Group, RankSnapshot, Record, Recording

__all__ = ["EVIL", "NOW", "SECOND", "operation", "report"]

EVIL = "</title></script><script>alert(1)</script><img src=http://evil.test/x onerror='alert(2)'>\"'&amp;"
SECOND = 10**9
NOW = 1000 * SECOND


def operation(
    number: int, *, world: Group, label: str = "", site: str = "train.py:7", kind: str = "all_reduce"
) -> Record:
    entered = NOW - 40 * SECOND + number * 2_000_000
    return Record(
        number, world, number + 1, kind, 4096, "float32", "sum", -1, site, label, 3, entered, entered + 10**6, False, -1
    )


def report(ranks: int, operations: int, *, text: str = "", site: str = "train.py:7") -> HangReport:
    """All ranks but the last wait."""
    world = Group(text or "0", "phalanx", tuple(range(ranks)))
    seen, stacks = [], {}
    for rank in range(ranks):
        records = [operation(number, world=world, label=text, site=site) for number in range(operations)]
        if rank < ranks - 1:
            last = records[-1]
            records[-1] = replace(last, left_ns=0, kind="broadcast", nbytes=1 << 20)
        recording = Recording(5000 + rank, rank, ranks, 3, text, operations, tuple(records))
        seen.append(RankSnapshot(rank, recording, "S", place=f"{site} step() {text}", asked=text))
        stacks[rank] = [f'  File "{site}{text}", line {rank % 3}, in step{text}', f"    call{rank % 3}()"]
    sentence = f"rank {ranks - 1} is in no operation; the others wait for it {text}"
    verdict = HangDiagnosis(sentence, (ranks - 1,), tuple(range(ranks - 1)), NOW - 35 * SECOND, "the `if` in line 55")
    return HangReport(f"phalanx run {text}", f"host{text}", "2026-11-23T01:00:00", NOW, verdict, seen, stacks)
