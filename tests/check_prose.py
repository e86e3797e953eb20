#!/usr/bin/env python3
"""check_prose.py [--lower] [--show FILE...]: the documents are plain, and what they name exists.

Each Markdown file and man page of the repository keeps these limits:

- At most 7% of its sentences have more than 25 words, README.md at most 5%; one such sentence is always allowed.
- No cell of a table hides such a sentence, and no bracket is inside a bracket.
- It has none of the words and spellings of WORDS, and no sentence that begins with "Who", "What" or "Of" as its subject.
- Relative links lead to files and headings that exist. A file that is named in backticks exists.

Comments in C++, CUDA, Python and proto sources keep the first limit by folder (COMMENTS), and messages and help texts in one
number (MESSAGES). Neither has any of WORDS. Comments name files that exist. How many of their sentences begin with "What" and the like, or have
a bracket inside a bracket, is bounded by folder, too.
All Markdown outside deploy/docs has at most ALL_WORDS words, those of tables included: READMEs say a thing once, and link to it.

Files that are not there yet have a line in tests/prose_budget.txt: what they may have at most. A line may only go down: the
check fails if it allows more than is needed. --lower writes the lines anew, never higher; --show prints what counts.
"""
import ast
import pathlib
import posixpath
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUDGET = ROOT / "tests/prose_budget.txt"
KINDS = ["long", "cells", "nested", "words", "paths"]
MOST_WORDS = 25
# A budget may be this much above what a file has, so that a better file need not touch it at once.
SLACK = 2
WORDS = [  # what is found; what to write
    (r"\b[Ww]hoever\b", "the noun: the caller, the rank"),
    (r"\b[Bb]y turns\b|\bin turns with\b", "interleaved"),
    (r"\b[Ss]eams?\b", "policy: TileScheduler, InputBarrier, Epilogue"),
    (r"\b[Ll]ate adds?\b", "deferred accumulate"),
    (r"\b[Bb]ystanders?\b", "non-member"),
    (r"\b[Hh]and-?overs?\b", "hand-off"),
    (r"\b[Dd]awdl\w+", "test delay"),
    (r"\bin vain\b", "failed"),
    (r"\bintroductions?\b", "handshake"),
    (r"\bhad best\b|\bfor people\b|\bfor who\b", "a plain sentence"),
    (r"\d us\b", "µs"),
    (r"(AllGather|Dispatch) \+ GEMM|GEMM \+ (ReduceScatter|AllReduce|Combine)", "without blanks: AllGather+GEMM"),
    (r"\bNVlink\b|\bNvlink\b", "NVLink"),
    (r"\bInfiniband\b", "InfiniBand"),
    (r"\bRoce\b|\bROCE\b", "RoCE"),
    (r"\b[Cc]uBlas\b|\bcublas\b", "cuBLAS"),
    (r"\bPytorch\b|\bpytorch\b", "PyTorch"),
    (r"\b[Ll]ibFabric\b|\bLibfabric\b(?! )", "libfabric"),
    (r"\bMkernel[d]?\b|\bMKernel[d]?\b", "mkernel, mkerneld"),
    (r"\b[Pp]roxies' threads\b", "proxy threads"),
]
# In a folder's comments: how many per cent of the sentences may be that long, how many may begin with "What" and the like, how many may
# have a bracket inside a bracket (formulas do). Lower a number when the folder is better.
COMMENTS = {"client": (7, 100, 12), "daemon": (7, 205, 4), "deploy": (7, 0, 0), "kernels": (9, 330, 16), "proto": (7, 9, 0),
            "shm": (7, 25, 2), "systemd": (0, 0, 0), "tests": (8, 395, 12)}
# The same for messages and help texts of programs, over all of them.
MESSAGES = 1
# Messages with a bracket inside a bracket: formulas, and a line of the shell.
MESSAGES_NESTED = 4
# Of all Markdown outside deploy/docs, as `wc -w` counts them. Lower it when there are fewer.
ALL_WORDS = 36000
SUBJECT = re.compile(r"(Who|Whoever|What|Of|That it)\b")
SUFFIXES = "h|c|cc|cu|cuh|py|sh|md|json|svg|proto|toml|txt|cmake|yml|yaml|pml|scd|service|csv|in|map"


def files():
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True,
                            text=True, check=True).stdout.split("\n")
    return sorted({name for name in listed if name and (ROOT / name).exists()})


def without_code(text):
    return re.sub(r"^```.*?^```[^\n]*$", "", text, flags=re.M | re.S)


def markdown_prose(text):
    """(paragraphs, cells): what is read as sentences. A code span counts as one word, a link as its text."""
    text = re.sub(r"<!--.*?-->", "", without_code(text), flags=re.S)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"``.*?``|`[^`]*`", "x", text, flags=re.S)
    paragraphs, cells, current = [], [], []

    def end():
        if current:
            paragraphs.append(" ".join(current))
            current.clear()

    for line in text.split("\n"):
        stripped = line.strip()
        if stripped.startswith("|"):
            end()
            cells += [cell.strip() for cell in re.split(r"(?<!\\)\|", stripped.strip("|"))]
        elif not stripped or stripped.startswith(("#", ">")) or (line.startswith("    ") and not current):
            end()
        else:
            if item := re.match(r"(?:[-*+]|\d+[.)])\s+(.*)", stripped):
                end()
                stripped = item[1]
            current.append(stripped)
    end()
    return paragraphs, cells


def man_prose(text):
    """As markdown_prose, of scdoc."""
    text = re.sub(r"^[;].*$", "", without_code(text), flags=re.M)
    text = re.sub(r"\*[^*\n]+\*(\(\d\))?|(?<!\w)_[^_\n]+_(?!\w)", "x", text)
    text = re.sub(r"\\(.)", r"\1", text)
    paragraphs, current = [], []
    for line in [*text.split("\n"), ""]:
        stripped = line.strip()
        if not stripped or stripped.startswith("#") or re.match(r"[\[|\]:<>-]", stripped):
            if current:
                paragraphs.append(" ".join(current))
            current = [re.sub(r"^[-]\s+", "", stripped)] if re.match(r"- ", stripped) else []
        else:
            current.append(stripped)
    return paragraphs, []


def comment_paragraphs(text):
    """Paragraphs of the comments in C, C++ and CUDA sources: consecutive lines are one, list items their own. Code and tables, which
    are indented by four blanks, are no prose."""
    blocks = re.findall(r"/\*\s(.*?)\*/", re.sub(r'"[^"\n]*"', "", text), re.S)
    paragraphs, current, in_item = [], [], False
    for block in blocks:
        for one in re.split(r"\n\s*\*?\s*\n", block):
            said = " ".join(re.sub(r"^\s*\*(?!\w)", "", line).strip() for line in one.split("\n"))
            paragraphs += [re.sub(r"`[^`]*`", "x", said)] if said else []
    for line in [*text.split("\n"), ""]:
        comment = re.match(r"\s*///?<?\s?(.*)", line)
        said = comment[1].strip() if comment else ""
        item = re.match(r"(?:-|\d+[.)]) +", said)
        code = said and not item and not in_item and comment[1].startswith("    ")
        if current and (not said or item or code):
            paragraphs.append(re.sub(r"`[^`]*`", "x", " ".join(current)))
            current = []
        in_item = bool(said and not code and (item or in_item))
        if said and not code:
            current.append(said[item.end():] if item else said)
    return paragraphs


def python_paragraphs(text):
    """The same of a Python source: docstrings, and comments of a line of their own."""
    paragraphs, current = [], []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.AsyncFunctionDef, ast.ClassDef, ast.FunctionDef, ast.Module)):
            said = re.sub(r"^ *(>>>|\.\.\.).*$|^    .*$", "", ast.get_docstring(node) or "", flags=re.M)
            paragraphs += re.split(r"\n\s*\n|\n\s*- ", said)
    for line in [*text.split("\n"), ""]:
        comment = re.match(r"\s*#(?!!)\s?(.*)", line)
        if comment and comment[1].strip():
            current.append(comment[1].strip())
        elif current:
            paragraphs.append(" ".join(current))
            current = []
    return [re.sub(r"``.*?``|`[^`]*`", "x", " ".join(one.split())) for one in paragraphs if one.strip()]


def paths_in_comments(text):
    """Files with a folder, and headers and documents without one, that `//` comments name."""
    for comment in re.findall(r"//+<?\s(.*)", text):
        yield from re.findall(rf"(?<![\w/.<$}}{{*\"-])((?:\.\./)*(?:[\w-]+/)+[\w.-]+\.(?:{SUFFIXES}))(?![\w.]*\w)", comment)
        yield from re.findall(r"(?<![\w/.<$}{*\"-])([a-z]\w+\.(?:h|cuh|cc|cu|md))(?![\w.]*\w)", comment)


def messages(checker):
    """(file, text) of the string literals of programs and libraries that are sentences: messages, help, log lines."""
    for name in checker.files:
        if name.endswith(".cc") and name.startswith(("client/", "daemon/", "kernels/", "shm/", "tests/bench/mkbench/")):
            code = re.sub(r"//[^\n]*", "", (ROOT / name).read_text(encoding="utf-8", errors="replace"))
            for literals in re.finditer(r'"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*', code):
                said = "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', literals[0]))
                if len(said.split()) > 3:
                    yield name, said


def bad_messages(checker):
    """(what is wrong with single ones, long sentences, how many sentences)."""
    wrong, long, nested, count = [], [], [], 0
    for name, said in messages(checker):
        parts = re.split(r"(?<=[.!?;])\s+|\\n", said)
        count += len(parts)
        long += [f"{name}: {one}" for one in parts if len(one.split()) > MOST_WORDS]
        wrong += [f"{name}: message with '{match[0]}', better: {better}: {said}" for pattern, better in WORDS if "blanks" not in better
                  for match in re.finditer(pattern, said)]
        if SUBJECT.match(said):
            wrong.append(f"{name}: message begins with '{said.split()[0]}': {said}")
        if re.search(r"\([^()]*\([^()]*\)[^()]*\)", said):
            nested.append(f"{name}: message with a bracket inside a bracket: {said}")
    return wrong + (nested if len(nested) > MESSAGES_NESTED else []), long, count


class Comments:
    """What is wrong with a folder's comments."""

    def __init__(self):
        self.count, self.long, self.subjects, self.nested, self.wrong = 0, [], [], [], []

    def add(self, checker, name, text):
        python = name.endswith(".py")
        paragraphs = python_paragraphs(text) if python else comment_paragraphs(text)
        for paragraph in paragraphs:
            self.wrong += [f"{name}: comment with '{match[0]}', better: {better}" for pattern, better in WORDS
                           if "pytorch" not in pattern and not name.startswith("tests/check_prose") for match in re.finditer(pattern, paragraph)]
            said = sentences(paragraph)
            self.count += len(said)
            self.long += [f"{name}: {one}" for one in said if len(one.split()) > MOST_WORDS]
            self.subjects += [f"{name}: {one}" for one in said if SUBJECT.match(one) and not one.rstrip().endswith("?")]
            self.nested += [f"{name}: {one}" for one in said if re.search(r"\([^()]*\([^()]*\)[^()]*\)", one)]
        if not python:
            self.wrong += [f"{name}: a comment names {path}, which is not there" for path in paths_in_comments(text)
                           if not checker.exists(name, path) and not path.endswith((".pb.h", ".pb.cc"))]

    def breaches(self, folder):
        per_cent, subjects, nested = COMMENTS[folder]
        show = f"python3 tests/check_prose.py --show {folder}"
        if 100 * len(self.long) > per_cent * self.count:
            yield (f"{folder}: {len(self.long)} of {self.count} sentences in comments have more than {MOST_WORDS} words, at most "
                   f"{per_cent}% may: {show}")
        for kind, have, most in (("begin with 'What' and the like", self.subjects, subjects), ("have a bracket inside a bracket", self.nested, nested)):
            if len(have) > most:
                yield f"{folder}: {len(have)} sentences in comments {kind}, at most {most} may: {show}"
        yield from self.wrong


def read_comments(checker):
    """{folder: Comments}."""
    found = {folder: Comments() for folder in COMMENTS}
    for name in checker.files:
        folder = name.split("/")[0]
        # Not ours: etcd's own interface.
        if folder in found and name.endswith((".h", ".c", ".cc", ".cu", ".cuh", ".py", ".proto")) and not name.startswith("proto/etcd/"):
            found[folder].add(checker, name, (ROOT / name).read_text(encoding="utf-8", errors="replace"))
    return found


def sentences(paragraph):
    return [one for one in re.split(r"(?<=[.!?])\s+(?=[A-Z(\"'“])", paragraph) if len(one.split()) > 2]


def headings(text):
    """The anchors of a document, as GitHub and MyST name them."""
    found = set()
    for title in re.findall(r"^#+ +(.+)$", without_code(text), re.M):
        title = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", title).strip().lower()
        found.add(re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title)))
    return found


class Checker:
    def __init__(self):
        self.files = files()
        folders = {str(parent) for name in self.files for parent in pathlib.PurePath(name).parents}
        self.places = {*self.files, *folders}
        self.tails = {"/".join(parts[i:]) for parts in (name.split("/") for name in self.places) for i in range(len(parts))}

    def documents(self):
        return [name for name in self.files if name.endswith((".md", ".scd"))]

    def exists(self, document, named):
        """Whether a path in backticks is one of the repository: from its root, from the document's folder, or the end of one."""
        named = re.sub(r"[:#].*$", "", named).rstrip("/")
        if any(sign in named for sign in "*{<$…"):
            return True
        here = posixpath.dirname(document)
        return posixpath.normpath(posixpath.join(here, named)) in self.places or re.sub(r"^(\.\./|\./)+", "", named) in self.tails

    def dead_links(self, document, text):
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", without_code(text)):
            if re.match(r"[a-z]+:", target):
                continue
            there = (ROOT / document).parent / target if target else ROOT / document
            if not there.exists():
                yield target
            elif anchor and there.suffix == ".md" and anchor not in headings(there.read_text(encoding="utf-8")):
                yield f"{target}#{anchor}"

    def dead_paths(self, document, text):
        """Files of the repository's kinds; absolute paths and what a user makes are no files of it."""
        for span in re.findall(r"`([^`\s]+)`", without_code(text)):
            if span.startswith(("/", "~", "-", "$")) or "://" in span or "=" in span or "(" in span:
                continue
            if re.fullmatch(rf"[\w.*{{}},/+-]+\.({SUFFIXES})", span) or re.fullmatch(r"(\.\./)*([\w.-]+/)+", span):
                if not self.exists(document, span):
                    yield span

    def check(self, document):
        """(kind: what counts, how many sentences, dead links)."""
        text = (ROOT / document).read_text(encoding="utf-8")
        paragraphs, cells = man_prose(text) if document.endswith(".scd") else markdown_prose(text)
        all_sentences = [one for paragraph in paragraphs for one in sentences(paragraph)]
        found = {kind: [] for kind in KINDS}
        found["long"] = [one for one in all_sentences if len(one.split()) > MOST_WORDS]
        found["cells"] = [one for cell in cells for one in re.split(r"(?<=[.!?;])\s+", cell) if len(one.split()) > MOST_WORDS]
        for one in all_sentences + cells:
            if re.search(r"\([^()]*\(", one):
                found["nested"].append(one)
            if SUBJECT.match(one) and not one.rstrip().endswith("?"):
                found["words"].append(f"begins with '{one.split()[0]}': {one}")
        for paragraph in paragraphs + cells:
            for pattern, better in WORDS:
                found["words"] += [f"'{match[0]}', better: {better}" for match in re.finditer(pattern, paragraph)]
        links = []
        if document.endswith(".md"):
            found["paths"] = list(self.dead_paths(document, text))
            links = list(self.dead_links(document, text))
        return found, len(all_sentences), links


def words_outside(names, root):
    """Words of all Markdown files but those of deploy/docs."""
    return sum(len((root / name).read_text(encoding="utf-8").split()) for name in names
               if name.endswith(".md") and not name.startswith("deploy/docs/"))


def free(document, kind, count):
    """What a file may have without a line in the budget."""
    if kind != "long":
        return 0
    return max(1, int(count * (0.05 if document == "README.md" else 0.07)))


def read_budget():
    budget = {}
    for line in BUDGET.read_text(encoding="utf-8").splitlines() if BUDGET.exists() else []:
        if line.strip() and not line.startswith("#"):
            name, *counts = line.split()
            budget[name] = dict(zip(KINDS, map(int, counts)))
    return budget


def write_budget(lines):
    head = ("# What documents may have at most that do not keep the limits of check_prose.py yet. Lines only go down:\n"
            "# python3 tests/check_prose.py --lower\n#\n")
    width = max((len(name) for name in lines), default=10)
    body = [f"{'# file':<{width}} " + " ".join(f"{kind:>6}" for kind in KINDS)]
    body += [f"{name:<{width}} " + " ".join(f"{lines[name][kind]:>6}" for kind in KINDS) for name in sorted(lines)]
    BUDGET.write_text(head + "\n".join(body) + "\n", encoding="utf-8")


def main(arguments):
    checker, budget, breaches, lower = Checker(), read_budget(), [], {}
    if arguments[:1] == ["--show"]:
        for document in arguments[1:]:
            if document in COMMENTS:
                comments = read_comments(checker)[document]
                print("\n".join([*comments.subjects, *comments.nested, *comments.long, *comments.wrong]))
                continue
            found, count, links = checker.check(document)
            for kind in KINDS:
                for one in found[kind]:
                    print(f"{document}: {kind}: {one}")
            print(f"{document}: {count} sentences, {len(found['long'])} long; dead links: {links or 'none'}")
        return 0
    total = [0, 0]
    for document in checker.documents():
        found, count, links = checker.check(document)
        total = [total[0] + count, total[1] + len(found["long"])]
        breaches += [f"{document}: dead link: {link}" for link in links]
        allowed = budget.get(document, {})
        line = {}
        for kind in KINDS:
            have, least = len(found[kind]), free(document, kind, count)
            most = max(least, allowed.get(kind, 0))
            line[kind] = min(have if have > least else 0, allowed.get(kind, 0) if budget else have)
            if have > most:
                examples = "".join(f"\n    {one}" for one in found[kind][-3:])
                breaches.append(f"{document}: {kind}: {have}, at most {most} (of {count} sentences; all: "
                                f"python3 tests/check_prose.py --show {document}), such as{examples}")
            elif allowed.get(kind, 0) > max(have, least) + SLACK:
                breaches.append(f"{document}: {kind}: {have}, and its budget is {allowed[kind]}: python3 tests/check_prose.py --lower")
        if any(line.values()):
            lower[document] = line
    if arguments == ["--lower"]:
        write_budget(lower)
        return 0
    comments = read_comments(checker)
    for folder, found in comments.items():
        breaches += found.breaches(folder)
    wrong, long, count = bad_messages(checker)
    breaches += wrong
    if 100 * len(long) > MESSAGES * count:
        breaches.append(f"{len(long)} of {count} sentences in messages have more than {MOST_WORDS} words, at most {MESSAGES}% may:\n" +
                        "\n".join(f"    {one}" for one in long))
    if (words := words_outside(checker.files, ROOT)) > ALL_WORDS:
        breaches.append(f"{words} words of Markdown outside deploy/docs, at most {ALL_WORDS} may be: leave out what headers, man pages or "
                        "other pages say, and link to them")
    for name in budget:
        if name not in checker.places:
            print(f"tests/prose_budget.txt: {name} is gone: python3 tests/check_prose.py --lower")
    print("\n".join(breaches), end="\n" if breaches else "")
    in_comments = sum(len(found.long) for found in comments.values()), sum(found.count for found in comments.values())
    print(f"Sentences of more than {MOST_WORDS} words: {total[1]} of {total[0]} ({100 * total[1] / max(1, total[0]):.1f}%) in documents, "
          f"{in_comments[0]} of {in_comments[1]} ({100 * in_comments[0] / in_comments[1]:.1f}%) in comments, {len(long)} of {count} in messages. "
          f"{words} words outside deploy/docs")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
