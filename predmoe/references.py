"""The paper's bibliography: written from a list of verified records, and a lint that holds it against the text and against that list.

A record is a mapping with key, title, authors, year, arxiv (may be empty), venue, verified. Records that are not verified are never cited.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from .config import ConfigError
from .tex import escape

REQUIRED = ("title", "author", "year")
ORIGIN = "splch2026predictability"   # the study whose method this is
# Found neither on arXiv nor under a DOI in the verified list: a repository, and proceedings or a journal that the venue names.
WITHOUT_ID = {ORIGIN: "url", "zhou2025oraclemoe": "note", "belady1966study": "note"}


def cited(text: str) -> list[str]:
    """The keys of every citation of a LaTeX text, in order, each once."""
    plain = re.sub(r"(?<!\\)%.*", "", text)
    found = re.findall(r"\\cite[tp]?\*?(?:\[[^]]*\])*\{([^}]*)\}", plain)
    return list(dict.fromkeys(key.strip() for group in found for key in group.split(",")))


def write(records: Iterable[Mapping], keys: Sequence[str]) -> str:
    """references.bib for `keys`, sorted. Raises ConfigError on a key that has no record or whose record is not verified."""
    held = {record["key"]: record for record in records}
    for key in keys:
        if key not in held:
            raise ConfigError(f"{key} is cited, but the list of references has no such key")
        if not held[key]["verified"]:
            raise ConfigError(f"{key} is cited, but its record is not verified ({held[key].get('missing', 'no reason given')})")
    return "\n".join(_entry(held[key]) for key in sorted(keys))


def _entry(record: Mapping) -> str:
    venue, fields = record.get("venue", ""), {"title": "{" + _title(record) + "}", "author": " and ".join(map(_name, record["authors"])), "year": record["year"]}
    doi = re.search(r"\bdoi (10\.\S+)", venue)
    repository = re.search(r"GitHub: (\S+)", venue)
    notes = [escape(re.sub(r",? ?doi 10\.\S+", "", re.sub(r" \(.*?\)$", "", venue)))] if venue and not repository else []
    if record.get("arxiv"):
        fields |= {"eprint": record["arxiv"], "archiveprefix": "arXiv"}
        notes.append(rf"\href{{https://arxiv.org/abs/{record['arxiv']}}}{{arXiv:{record['arxiv']}}}")
    if doi:
        fields["doi"] = doi[1].rstrip(",.")
    if repository:
        fields["url"] = f"https://github.com/{repository[1]}"
    if notes:
        fields["note"] = ". ".join(notes)
    return f"@misc{{{record['key']},\n" + "".join(f"  {name} = {{{value}}},\n" for name, value in fields.items()) + "}\n"


def _title(record: Mapping) -> str:
    """A title with its quotation marks as LaTeX sets them."""
    return re.sub(r'"([^"]*)"', r"``\1''", escape(record["title"]))


def _name(author: str) -> str:
    """A person as BibTeX reads it; what is one word, or a team, is kept together, and "et al." is BibTeX's "others"."""
    if author == "et al.":
        return "others"
    return f"{{{escape(author)}}}" if " " not in author or "Team" in author else escape(author)


def read(text: str) -> list[tuple[str, dict[str, str]]]:
    """(key, fields) of each entry of a bibliography in the form of `write`. Raises ConfigError where an entry cannot be read."""
    entries = []
    for block in re.split(r"^(?=@)", text, flags=re.MULTILINE):
        if not block.strip():
            continue
        head = re.match(r"@\w+\{([^,\s]+),\n", block)
        if not head or not block.rstrip().endswith("}"):
            raise ConfigError(f"references.bib: this entry cannot be read: {block.strip()[:60]!r}")
        entries.append((head[1], dict(re.findall(r"^  (\w+) = \{(.*)\},$", block, flags=re.MULTILINE))))
    return entries


def lint(bibliography: str, tex: str, records: Iterable[Mapping] | None = None) -> list[str]:
    """What is wrong with references.bib, one sentence each; empty where nothing is. `records`: the verified list, where it is at hand."""
    entries, wanted, wrong = read(bibliography), cited(tex), []
    keys = [key for key, _ in entries]
    wrong += [f"{key} stands twice" for key in sorted({key for key in keys if keys.count(key) > 1})]
    wrong += [f"{key} is cited and has no entry" for key in wanted if key not in keys]
    wrong += [f"{key} has an entry and is never cited" for key in keys if key not in wanted]
    if ORIGIN not in wanted:
        wrong.append(f"{ORIGIN}, the origin of the method, is not cited")
    for name in ("eprint", "doi", "title"):
        values = [fields[name].lower() for _, fields in entries if name in fields]
        wrong += [f"two entries share the {name} {value}" for value in sorted({value for value in values if values.count(value) > 1})]
    for key, fields in entries:
        if not re.fullmatch(r"[a-z0-9]+\d{4}[a-z0-9]+", key):
            wrong.append(f"the key {key} is not AUTHORYEARWORD")
        wrong += [f"{key} has no {name}" for name in REQUIRED if not fields.get(name)]
        if not fields.get("eprint") and not fields.get("doi") and not fields.get(WITHOUT_ID.get(key, "eprint")):
            wrong.append(f"{key} has neither an arXiv id nor a DOI")
        if "eprint" in fields and not re.fullmatch(r"\d{4}\.\d{4,5}", fields["eprint"]):
            wrong.append(f"{key}: {fields['eprint']} is no arXiv id")
        if "doi" in fields and not re.fullmatch(r"10\.\d{4,}/\S+", fields["doi"]):
            wrong.append(f"{key}: {fields['doi']} is no DOI")
        if "eprint" in fields and fields["eprint"] not in fields.get("note", ""):
            wrong.append(f"{key}: the printed note does not show arXiv:{fields['eprint']}")
    return wrong + (_against(entries, records) if records is not None else [])


def _against(entries, records) -> list[str]:
    held, wrong = {record["key"]: record for record in records}, []
    for key, fields in entries:
        if key not in held:
            wrong.append(f"{key} is not in the list of references")
            continue
        record = held[key]
        if not record["verified"]:
            wrong.append(f"{key} is not verified")
        for name, mine, theirs in (("title", fields.get("title", "").strip("{}"), _title(record)), ("arXiv id", fields.get("eprint", ""), record.get("arxiv", "")),
                                   ("year", fields.get("year", ""), record["year"]), ("author", fields.get("author", ""), " and ".join(map(_name, record["authors"])))):  # fmt: skip
            if mine != theirs:
                wrong.append(f"{key}: the {name} is {mine!r} here and {theirs!r} in the list of references")
    return wrong
