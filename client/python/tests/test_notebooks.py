"""The notebooks of examples/notebooks. Debian: python3-nbclient, python3-ipykernel, python3-numba, python3-scipy."""
import importlib.util
import os
import unittest

from cluster import ROOT, Cluster

NEEDED = "nbclient", "nbformat", "ipykernel", "numba", "scipy"


@unittest.skipUnless(all(map(importlib.util.find_spec, NEEDED)), f"needs {', '.join(NEEDED)}")
class Notebooks(unittest.TestCase):
    def test_notebooks(self):
        import nbclient
        import nbformat

        self.addCleanup(Cluster().stop)
        os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # Cluster.stop removes it
        notebooks = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))
        self.assertEqual(len(notebooks), 2)
        for path in notebooks:
            with self.subTest(path.name):
                notebook = nbformat.read(path, as_version=4)
                nbformat.validate(notebook)
                self.assertFalse([cell for cell in notebook.cells if cell.get("outputs")], "clear the outputs before you commit")
                nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()  # raises if a cell does


if __name__ == "__main__":
    unittest.main()
