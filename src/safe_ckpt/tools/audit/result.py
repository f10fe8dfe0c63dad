"""The result of an audit: as text, for programs, and as JUnit XML."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

from safe_ckpt.errors import ResumeDiffersError
from safe_ckpt.tools.audit.compare import MEANS, Comparison, Finding


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The result of an audit.

    Attributes:
        killed: behind how many optimizer steps; several, where nothing was resumed after the kills before the last.
        comparisons: one for each resume; none if nothing can be compared.
        ignored: what differs between two runs that nothing stopped.
        cannot: why nothing can be compared; empty if it can.
        findings: what differs behind any resume, once.
    """

    killed: tuple[int, ...]
    comparisons: tuple[Comparison, ...]
    ignored: tuple[str, ...]
    cannot: str
    findings: tuple[Finding, ...]

    @property
    def equal(self) -> bool:
        """Whether everything could be compared, and nothing differs."""
        return not self.findings and not self.cannot

    def check(self) -> None:
        """Raise if the runs differ, for a test.

        Raises:
            ResumeDiffersError: it is not equal; the error says what differs.
        """
        if not self.equal:
            raise ResumeDiffersError(message=str(self))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.cannot:
            yield f"cannot compare: {self.cannot}"
        elif self.ignored:
            yield f"not compared, for it differs between two runs that nothing stopped: {', '.join(self.ignored)}"
        *in_vain, last = map(str, self.killed)
        if in_vain:
            yield f"nothing was resumed after a kill behind {', '.join(in_vain)} steps, so it was killed behind {last} as well"
        yield from map(str, self.findings)
        notes = dict.fromkeys(note for one in self.comparisons for note in one.notes)
        if notes:
            yield f"variables of the script that differ at the first step after a resume: {'; '.join(notes)}"
        if self.equal:
            steps = sum(one.steps for one in self.comparisons)
            yield f"equal: {steps} optimizer steps after {len(self.comparisons)} resumes, killed behind {last} steps"

    def as_json(self) -> dict[str, object]:
        """A document of JSON: its fields, and ``equal``."""
        return {"equal": self.equal, **dataclasses.asdict(self)}

    def as_junit(self) -> str:
        """JUnit XML: a test case for each category."""
        suite = ElementTree.Element("testsuite", name="safe-ckpt audit", tests=str(len(MEANS)))
        for category, (title, _) in MEANS.items():
            case = ElementTree.SubElement(suite, "testcase", classname="safe_ckpt.audit", name=title)
            found = "\n".join(str(one) for one in self.findings if one.category == category)
            if found:
                ElementTree.SubElement(case, "failure", message=found.partition("\n")[0]).text = found
            elif self.cannot:
                ElementTree.SubElement(case, "skipped", message=self.cannot)
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)
