"""Commands in documents, and what they say is printed: "$ command" lines, each followed by what a person sees.

In what is seen, "..." stands for any text, a line of it alone for any lines, and a run of blanks for any of them. A command that
ends with a backslash goes on in the next line."""
import re


def examples(lines):
    """[[command, expected lines]] of one block."""
    found, goes_on = [], False
    for line in lines:
        if goes_on:
            found[-1][0] += "\n" + line
        elif line.startswith("$ "):
            found.append([line[2:], []])
        else:
            found[-1][1].append(line)
        goes_on = line.endswith("\\") and not found[-1][1]
    return found


def pattern_of(line):
    words = re.split(r"(\.\.\.|\s+)", line.strip())
    return "".join(".*" if word == "..." else r"\s+" if word.isspace() else re.escape(word) for word in words)


def matches(expected, seen):
    pattern = "".join(r"(?:.*\n)*" if line.strip() == "..." else r"[ \t]*" + pattern_of(line) + r"[ \t]*\n" for line in expected)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in seen)) is not None


def mismatch(status, expected, seen):
    return (f"  exit status {status}; expected:\n" + "".join(f"    {line}\n" for line in expected) + "  seen:\n" +
            "".join(f"    {line}\n" for line in seen))
