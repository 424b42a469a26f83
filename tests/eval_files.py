"""A handful of made-up items in the form of the local evaluation files, for tests."""

import json
from pathlib import Path

QUESTIONS = [
    {"query": "Question: What does a cache keep", "choices": ["what is used again", "what is never used", "the weather", "nothing"], "gold": 0},
    {"query": "Question: Which of these is slow", "choices": ["memory", "a disk", "a register", "light"], "gold": 1},
    {"query": "Question: Which reads first", "choices": ["the last", "the router", "the expert", "none"], "gold": 2},
]


def lines(folder: Path, name: str, rows) -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def write(folder: Path) -> Path:
    """All six files, three items each; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines(folder, "arc_easy.jsonl", QUESTIONS)
    lines(folder, "arc_challenge.jsonl", QUESTIONS[::-1])
    lines(folder, "openbook_qa.jsonl", [row | {"query": row["query"].removeprefix("Question: ")} for row in QUESTIONS])
    lines(folder, "piqa.jsonl", [{"query": f"{row['query']}\n", "choices": row["choices"][:2], "gold": row["gold"] % 2} for row in QUESTIONS])
    lines(folder, "lambada_openai.jsonl", [{"context": f"the {word} reads before and after the", "continuation": word} for word in ("cache", "disk", "token")])
    items = [("Reading: A man opens a book. he", 3), ("Health: How to rest. Lie down. Close your eyes.", 0), ("Cooking: Someone stirs a pot. the lady in red", 2)]
    text = "".join(f"{context}\n{label}\n" + "".join(f"ending number {i}.\n" for i in range(4)) for context, label in items)
    (folder / "hellaswag_val_full.txt").write_text(text)
    return folder
