"""What our programs say of themselves, for the tests that compare documents with them."""
import functools
import re
import subprocess


@functools.lru_cache(maxsize=None)
def help_of(program, *commands):
    """The text of --help; None when there is no such command."""
    done = subprocess.run([program, *commands, "--help"], capture_output=True, text=True, timeout=60)
    return done.stdout if done.returncode == 0 else None


def subcommands(text):
    """Of one --help: the list ends at the first empty line, examples may follow."""
    listed = re.search(r"^Subcommands:\n((?: .*\n?)+)", text, re.M)
    return re.findall(r"^  ([a-z][a-z-]*)", listed.group(1), re.M) if listed else []


def all_commands(program, *before):
    """("link", "show") and so on, without those that only hold others; () when there are none."""
    inner = subcommands(help_of(program, *before))
    return [one for name in inner for one in all_commands(program, *before, name)] if inner else [before]


def all_flags(program):
    """The long flags of the program and of all its commands."""
    texts = [help_of(program)] + [help_of(program, *command) for command in all_commands(program)]
    return {flag for text in texts for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)}


def flags_in(text):
    return re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)


def trouble(span):
    """What is wrong with "mkctl drain --timeout 5s | resume", of which only commands and flags count; None when nothing is."""
    program = span.split()[0]
    for one in span[len(program):].split("|"):
        commands = []
        for part in one.split():
            if not re.fullmatch(r"[a-z][a-z-]*", part):
                break  # what stands for something else: FILE, OPERATOR
            commands.append(part)
        if help_of(program, *commands) is None:
            return f"there is no `{' '.join([program, *commands])}`"
        known = flags_in(help_of(program, *commands) + help_of(program))
        for flag in flags_in(one):
            if flag not in known:
                return f"`{' '.join([program, *commands])}` has no {flag}"
    return None
