"""An executor and an agent for tests of the package rfaas, from a built tree."""
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ECHO = str(ROOT / "build/functions/echo.so")


class Cluster:
    """Sets the environment for sessions of this process and its children. Ends the daemons in stop()."""

    def __init__(self, provider: str = "shm", cores: int = 4) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="rfaas-python-test")
        directory = Path(self._directory.name)
        secret = directory / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32) + "\n")
        self._before = dict(os.environ)
        self._log = open(directory / "log", "w+")
        agent = str(directory / "agent.sock")
        os.environ.update(RFAAS_LIBRARY=str(ROOT / "lib/librfaas.so.0"), RFAAS_AGENT=str(ROOT / "libexec/rfaas-agent"), RFAAS_AGENT_SOCKET=agent,
                          RFAAS_SECRET_FILE=str(secret), RFAAS_PROVIDER=provider)
        os.environ.pop("RFAAS_MANAGER", None)
        self._agent = self._start("libexec/rfaas-agent", "--socket", agent)
        self._executor = self._start("bin/executor", "--listen", "127.0.0.1:0", "--secret-file", str(secret), "--share-cores", str(cores),
                                     "--max-workers", "16", "--providers", provider, "--grace", "2s")
        os.environ["RFAAS_EXECUTOR"] = self._await("msg=ready address=").split()[0]
        deadline = time.monotonic() + 20
        while True:
            with socket.socket(socket.AF_UNIX) as s:
                if not s.connect_ex(agent):
                    break
            if time.monotonic() > deadline:
                raise RuntimeError("the agent does not listen")
            time.sleep(0.01)

    def _start(self, program: str, *arguments: str) -> subprocess.Popen:
        return subprocess.Popen([ROOT / program, *arguments], stderr=self._log, stdout=self._log)

    def _await(self, text: str) -> str:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and self._executor.poll() is None:
            log = Path(self._log.name).read_text()
            if text in log:
                return log.partition(text)[2]
            time.sleep(0.01)
        raise RuntimeError("the executor is not ready: " + Path(self._log.name).read_text())

    def stop(self) -> None:
        for daemon in self._executor, self._agent:
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._executor, self._agent:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._log.close()
        os.environ.clear()
        os.environ.update(self._before)
        self._directory.cleanup()
