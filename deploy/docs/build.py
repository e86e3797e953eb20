#!/usr/bin/env python3
"""build.py <output folder>: makes the site of deploy/docs, offline, from what the repository has.

The documents link to READMEs, headers and pictures of the whole repository. So they are staged: a copy of all Markdown files, and
of all files that they link to, at the same places. Sphinx makes pages of the Markdown files and downloads of the others. The C++
reference is made from the headers' comments by Doxygen and Breathe. A warning of Sphinx is an error.
"""
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.parse

root = pathlib.Path(__file__).resolve().parents[2]
docs = root / "deploy/docs"


def stage(folder):
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"], cwd=root, text=True,
                            capture_output=True, check=True).stdout.split()
    pages = [root / name for name in listed if (root / name).exists()]
    wanted = set()
    for page in pages:
        text = page.read_text(encoding="utf-8")
        name = page.relative_to(root)
        for target in re.findall(r"\]\(([^)#\s]+)", text) + re.findall(r"^```\{literalinclude\} (\S+)", text, re.M):
            linked = (page.parent / target).resolve()
            if not re.match(r"[a-z]+:", target) and linked.is_file() and linked.is_relative_to(root) and linked.suffix != ".md":
                wanted.add(linked.relative_to(root))
            elif not re.match(r"[a-z]+:", target) and linked.is_dir():
                # A folder's page is its README.
                text = text.replace(f"]({target})", f"]({target.rstrip('/')}/README.md)")
        if not name.is_relative_to("deploy/docs") or name.name == "README.md":
            # Not in the table of contents: reached by links.
            text = "---\norphan: true\n---\n" + text
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        text = re.sub(r"(\]\([^)#\s]+)#L\d+\)", r"\1)", text)  # the site shows files whole
        (folder / name).write_text(text, encoding="utf-8")
    for name in wanted:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, folder / name)
    (folder / "deploy/docs/conf.py").parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(docs / "conf.py", folder / "deploy/docs/conf.py")


def reference(folder):
    """Doxygen's XML of the public headers."""
    settings = {"INPUT": root / "client/include/mkernel", "OUTPUT_DIRECTORY": folder / "doxygen", "GENERATE_HTML": "NO",
                "GENERATE_LATEX": "NO", "GENERATE_XML": "YES", "QUIET": "YES", "WARN_IF_UNDOCUMENTED": "NO", "MACRO_EXPANSION": "YES",
                "EXPAND_ONLY_PREDEF": "YES", "PREDEFINED": "MK_EXPORT= MK_C_EXPORT=", "EXTRACT_PRIVATE": "NO",
                "ENABLE_PREPROCESSING": "YES", "STRIP_FROM_PATH": root,
                # Sphinx cannot parse digit separators: 60'000.
                "INPUT_FILTER": "\"sed -E \\\"s/([0-9])'([0-9]{3})/\\1\\2/g\\\"\""}
    (folder / "doxygen").mkdir(parents=True)
    subprocess.run(["doxygen", "-"], input="".join(f"{key} = {value}\n" for key, value in settings.items()), text=True, check=True,
                   stdout=subprocess.DEVNULL)


def dead_links(folder):
    """Links of the site's pages to files that are not there."""
    for page in sorted(folder.rglob("*.html")):
        for target in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:|//", target) and not (page.parent / urllib.parse.unquote(target)).exists():
                yield f"{page.relative_to(folder)}: {target}"


def main(output):
    staged = output / "source"
    shutil.rmtree(output, ignore_errors=True)
    staged.mkdir(parents=True)
    stage(staged)
    reference(staged)
    subprocess.run([sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", staged / "deploy/docs", staged, output / "html"],
                   check=True)
    if dead := list(dead_links(output / "html/deploy/docs")):
        sys.exit("dead links:\n" + "\n".join(dead))
    print(f"{output}/html/deploy/docs/index.html")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        main(pathlib.Path(sys.argv[1]).resolve())
    except subprocess.CalledProcessError as error:
        sys.exit(f"build.py: {error.cmd[0]} ended with {error.returncode}")
