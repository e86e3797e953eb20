#!/usr/bin/env python3
"""check_prose.py finds what it promises to find, and nothing in plain text."""
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import check_prose  # noqa: E402

LONG = " ".join(["word"] * 26) + "."
SHORT = " ".join(["word"] * 25) + "."


class CheckProse(unittest.TestCase):
    checker = check_prose.Checker()

    def long_sentences(self, text):
        paragraphs, _ = check_prose.markdown_prose(text)
        return [one for paragraph in paragraphs for one in check_prose.sentences(paragraph) if len(one.split()) > check_prose.MOST_WORDS]

    def test_a_sentence_of_26_words_is_long_and_one_of_25_is_not(self):
        self.assertEqual(len(self.long_sentences(f"{LONG} A {SHORT[5:]}")), 1)

    def test_a_code_span_and_a_link_count_as_their_words(self):
        self.assertEqual(self.long_sentences(" ".join(["word"] * 23) + " `a b c d` [e](f g)."), [])

    def test_lines_of_a_paragraph_are_one_sentence_and_list_items_are_not(self):
        half = " ".join(["word"] * 14)
        self.assertEqual(len(self.long_sentences(f"{half}\n{half}.")), 1)
        self.assertEqual(self.long_sentences(f"- {half}\n- {half}."), [])

    def test_code_blocks_headings_and_tables_are_no_prose(self):
        self.assertEqual(self.long_sentences(f"# {LONG}\n```\n{LONG}\n```\n| {LONG} |\n"), [])
        self.assertEqual(check_prose.markdown_prose(f"| a | {LONG} |")[1], ["a", LONG])

    def test_a_man_page_s_paragraphs_are_read(self):
        paragraphs, _ = check_prose.man_prose(f"# NAME\n\n{LONG}\n\n*--flag* _FILE_\n\tShort text here.\n")
        self.assertEqual([len(one.split()) for one in paragraphs], [26, 5])

    def test_comments_are_read_over_their_lines(self):
        text = "/// One `two three` four\n/// five.\nint x;  // no\n// - item one two\n// - item three four\n"
        self.assertEqual(check_prose.comment_paragraphs(text), ["One x four five.", "item one two", "item three four"])
        text = "/// Used so:\n///     auto a = b();\n/// and so.\n///  1. first\n///     goes on\n///  2. second\n"
        self.assertEqual(check_prose.comment_paragraphs(text), ["Used so:", "and so.", "first goes on", "second"])

    def test_comments_of_c_are_read(self):
        text = "/* One `two three`\n * four.\n *\n * Five. */\nint x; /* six\n        * seven */\n"
        self.assertEqual(check_prose.comment_paragraphs(text), ["One x four.", "Five.", "six seven"])

    def test_docstrings_and_comments_of_python_are_read_and_examples_are_not(self):
        text = '"""One `two` three.\n\n>>> f(1)\n"""\n\n# Four five\n# six.\ndef f():\n    """Seven eight."""\n'
        self.assertEqual(check_prose.python_paragraphs(text), ["One x three.", "Seven eight.", "Four five six."])

    def test_comments_have_none_of_the_words_and_name_files_that_exist(self):
        found = check_prose.Comments()
        found.add(self.checker, "shm/x.h", "/// Whoever reads `whoever` reads shm/ring.h, ring.h and shm/gone.h.\n/// What a thing is. A (b (c) d) e.\n")
        self.assertEqual(found.wrong, ["shm/x.h: comment with 'Whoever', better: the noun: the caller, the rank",
                                       "shm/x.h: a comment names shm/gone.h, which is not there"])
        self.assertEqual(([one.partition(": ")[2] for one in found.subjects], [one.partition(": ")[2] for one in found.nested]),
                         (["Whoever reads x reads shm/ring.h, ring.h and shm/gone.h.", "What a thing is."], ["A (b (c) d) e."]))

    def test_a_folder_whose_comments_are_over_their_limits_is_named(self):
        found = check_prose.Comments()
        found.add(self.checker, "systemd/x.h", f"/// {LONG}\n/// What a thing is.\n/// A (b (c) d) e.\n")
        self.assertEqual([one.split(": python3")[0] for one in found.breaches("systemd")], [
            "systemd: 1 of 3 sentences in comments have more than 25 words, at most 0% may",
            "systemd: 1 sentences in comments begin with 'What' and the like, at most 0 may",
            "systemd: 1 sentences in comments have a bracket inside a bracket, at most 0 may"])

    def test_paths_and_links_that_do_not_exist_are_found(self):
        text = "`tests/run.sh` `run.sh` `../tests/run.sh` `no/such.h` `/etc/x.toml` [a](run.sh) [b](gone.md) [c](README.md#no-heading)"
        self.assertEqual(list(self.checker.dead_paths("tests/README.md", text)), ["no/such.h"])
        self.assertEqual(list(self.checker.dead_links("tests/README.md", text)), ["gone.md", "README.md#no-heading"])

    def test_headings_become_anchors(self):
        self.assertEqual(check_prose.headings("## How it's `done`, quickly\n"), {"how-its-done-quickly"})

    def test_words_are_counted_in_tables_and_code_but_not_in_the_documents_for_users(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name in ("a.md", "b/README.md", "deploy/docs/c.md", "d.txt"):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text("one two\n```\nthree\n```\n| four |\n", encoding="utf-8")
            self.assertEqual(check_prose.words_outside(["a.md", "b/README.md", "deploy/docs/c.md", "d.txt"], root), 2 * 8)

    def test_a_small_file_may_have_one_long_sentence_and_the_readme_5_percent(self):
        self.assertEqual([check_prose.free("a.md", "long", 3), check_prose.free("a.md", "long", 100), check_prose.free("README.md", "long", 100),
                          check_prose.free("a.md", "nested", 100)], [1, 7, 5, 0])


if __name__ == "__main__":
    unittest.main()
