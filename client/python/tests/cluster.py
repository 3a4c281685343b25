"""An executor and an agent for tests of the package rfaas, from a built tree."""
import atexit
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

    def __init__(self, provider: str = "shm", cores: int = 4, executors: int = 1, settings: tuple[str, ...] = ()) -> None:
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
        for name in "RFAAS_MANAGER", "RFAAS_EXECUTOR":
            os.environ.pop(name, None)
        self._daemons = [self._start("libexec/rfaas-agent", "--socket", agent)]
        atexit.register(self.stop)  # in case the test's own clean-up does not get that far
        self._start_daemons(secret, provider, cores, executors, agent, settings)

    def _start_daemons(self, secret: Path, provider: str, cores: int, executors: int, agent: str, settings: tuple[str, ...]) -> None:
        with_secret = "--listen", "127.0.0.1:0", "--secret-file", str(secret)
        options = *with_secret, "--share-cores", str(cores), "--max-workers", "16", "--providers", provider, "--grace", "2s", *settings
        if executors > 1:  # and a resource manager, which they register with
            self._daemons.append(self._start("bin/resource-manager", *with_secret))
            os.environ["RFAAS_MANAGER"] = self._await("msg=ready address=", 1)
            options = *options, "--manager", os.environ["RFAAS_MANAGER"]
        self._daemons += [self._start("bin/executor", *options) for _ in range(executors)]
        if executors > 1:
            self._await("msg=registered ", executors)
        else:
            os.environ["RFAAS_EXECUTOR"] = self._await("msg=ready address=", 1)
        deadline = time.monotonic() + 60
        while True:
            with socket.socket(socket.AF_UNIX) as s:
                if not s.connect_ex(agent):
                    break
            if time.monotonic() > deadline:
                raise RuntimeError("the agent does not listen")
            time.sleep(0.01)

    def _start(self, program: str, *arguments: str) -> subprocess.Popen:
        return subprocess.Popen([ROOT / program, *arguments], stderr=self._log, stdout=self._log)

    def _await(self, text: str, times: int) -> str:
        """Waits until daemons have logged a text that often. Returns the word that follows."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and all(daemon.poll() is None for daemon in self._daemons):
            _, *after = Path(self._log.name).read_text().split(text)
            if len(after) >= times and "\n" in after[-1]:
                return after[-1].split()[0]
            time.sleep(0.01)
        raise RuntimeError("the daemons are not ready: " + Path(self._log.name).read_text())

    def stop(self) -> None:
        if not self._daemons:
            return
        for daemon in self._daemons:
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons = []
        self._log.close()
        os.environ.clear()
        os.environ.update(self._before)
        self._directory.cleanup()
