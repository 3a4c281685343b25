"""The examples in README.md and docs/python.md that import rfaas run, with the function of README.md."""
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from cluster import ROOT, Cluster


class Documents(unittest.TestCase):
    def test_examples(self):
        cluster = Cluster(os.environ.get("RFAAS_TEST_PROVIDER", "shm"))
        self.addCleanup(cluster.stop)
        texts = {name: (ROOT / name).read_text() for name in ("README.md", "docs/python.md")}
        function = next(text for text in re.findall(r"```c\n(.*?)```", texts["README.md"], re.DOTALL) if "hypotenuse(void *args" in text)
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "hypot.c").write_text(function)
            subprocess.run(["gcc", "-shared", "-fPIC", "-o", "libhypot.so", "hypot.c", "-lm"], cwd=directory, check=True)
            for name, text in texts.items():
                examples = [e for e in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "import rfaas" in e]
                self.assertEqual(len(examples), 2 + 2 * (name != "README.md"), name)
                for example in examples:
                    done = subprocess.run([sys.executable, "-c", example], cwd=directory, capture_output=True, text=True, timeout=60,
                                          env=os.environ | {"XDG_CACHE_HOME": directory})
                    self.assertEqual(done.stderr, "", name)
                    self.assertRegex(done.stdout, r"^(5\.0\n)?(\[1\.0, 1\.41\d+, 2\.23\d+, .*)?$", name)


if __name__ == "__main__":
    unittest.main()
