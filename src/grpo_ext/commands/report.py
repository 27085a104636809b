"""`grpo-ext report`: a run, or several side by side, as one HTML file that needs no network."""

import argparse
import hashlib
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from grpo_ext.errors import ConfigError, Problem
from grpo_ext.evaluation.results import FOLDER as EVALUATION
from grpo_ext.report.page import html, write_report
from grpo_ext.report.reading import COMPLETIONS, read_runs
from grpo_ext.trainer.checkpoints.finish import METRICS_FILE
from grpo_ext.trainer.output_lock import is_held
from grpo_ext.trainer.recording import FOLDER

OUTPUT = "report.html"
HOST = "127.0.0.1"
INTERVAL = 5.0
"""Seconds between two checks for new files."""


def run(options: argparse.Namespace) -> int:
    """Write the report; with --watch serve it until no run is training any more."""
    output = options.output or (options.runs[0] / OUTPUT if len(options.runs) == 1 else Path(OUTPUT))
    if output.suffix.lower() not in (".html", ".htm"):
        cure = "Let its name end in .html."
        raise ConfigError([Problem("--output", str(output), "the report is an HTML file", cure)])
    if output.is_dir():
        raise ConfigError([Problem("--output", str(output), "it is a folder", "Name a file.")])
    try:
        write_report(options.runs, output)
        if options.watch:
            watch(options.runs, output, options.port)
    except KeyboardInterrupt:
        pass
    print(f"Report: {output} ({output.stat().st_size / 1e6:.1f} MB)")
    return 0


def watch(runs: Sequence[Path], output: Path, port: int = 0) -> None:
    """Serve the report on loopback and update it until no run is training; then write it a last time.

    Raises:
        OSError: the port is taken.
    """
    served = Served(runs)
    server = ThreadingHTTPServer((HOST, port), _handler(served))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"Watching: http://{HOST}:{server.server_port}  (until the run ends, or Ctrl-C)", flush=True)
    try:
        while any(map(is_held, runs)):
            if served.update():
                output.write_text(served.page, encoding="utf-8")
            time.sleep(INTERVAL)
    finally:
        server.shutdown()
        server.server_close()
        write_report(runs, output)


class Served:
    """The current page, and the version of the run folders that it shows."""

    def __init__(self, runs: Sequence[Path]) -> None:
        self.runs, self.version, self.page = runs, "", ""
        self.update()

    def update(self) -> bool:
        """Render the page again if the folders have changed; return whether they have."""
        version = _state(self.runs)
        if version == self.version:
            return False
        self.page, self.version = html(read_runs(self.runs), watched=version), version
        return True


def _state(runs: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for folder in runs:
        watched = [folder / METRICS_FILE, *(folder / COMPLETIONS).glob("*"), *(folder / EVALUATION).glob("*/*.json")]
        watched += (folder / FOLDER).glob("step_*/*.pt")
        for path in sorted(watched):
            if path.exists():
                found = path.stat()
                digest.update(f"{path} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _handler(served: Served) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            found = {"/": (served.page, "text/html"), "/version": (served.version, "text/plain")}.get(self.path)
            if host not in (HOST, "localhost") or found is None:  # another host name: DNS rebinding
                self.send_error(404 if found is None else 403)
                return
            content = found[0].encode()
            self.send_response(200)
            self.send_header("Content-Type", f"{found[1]}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            """Keep requests out of the terminal."""

    return Handler
