"""`grpo-ext report`: a run, or several beside each other, as one HTML file that needs no network."""

import argparse
import hashlib
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from grpo_ext.errors import ConfigError
from grpo_ext.evaluation.results import FOLDER as EVALUATION
from grpo_ext.report.page import html, write_report
from grpo_ext.report.reading import COMPLETIONS, read_runs
from grpo_ext.trainer.checkpoints.finish import METRICS_FILE
from grpo_ext.trainer.output_lock import is_held
from grpo_ext.trainer.recording import FOLDER

OUTPUT = "report.html"
HOST = "127.0.0.1"
EVERY = 5.0
"""Seconds between two looks at the folders."""


def run(argv: Sequence[str]) -> int:
    """Write the file; with --watch serve it for as long as one of the runs goes on."""
    parser = argparse.ArgumentParser(prog="grpo-ext report", description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output_dir of a run")
    parser.add_argument("--output", type=Path, help="default: report.html in RUN, or here where there are several")
    parser.add_argument("--watch", action="store_true", help="serve it on loopback while a run goes on")
    parser.add_argument("--port", type=int, default=0, help="for --watch; default: any that is free")
    options = parser.parse_args(argv)
    output = options.output or (options.runs[0] / OUTPUT if len(options.runs) == 1 else Path(OUTPUT))
    try:
        write_report(options.runs, _checked(output))
        if options.watch:
            watch(options.runs, output, options.port)
    except (ConfigError, OSError) as error:
        print(f"grpo-ext report: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    print(f"Report: {output} ({output.stat().st_size / 1e6:.1f} MB)")
    return 0


def _checked(output: Path) -> Path:
    if output.suffix.lower() not in (".html", ".htm"):
        raise ConfigError([f"--output {output}: the report is an HTML file. Let its name end in .html."])
    if output.is_dir():
        raise ConfigError([f"--output {output}: there is a folder of that name. Name a file."])
    return output


def watch(runs: Sequence[Path], output: Path, port: int = 0) -> None:
    """Serve the report on loopback, made anew when the folders change, until no run goes on; then write it once more.

    Raises:
        OSError: the port is taken.
    """
    served = Served(runs)
    server = ThreadingHTTPServer((HOST, port), _handler(served))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"Watching: http://{HOST}:{server.server_port}  (ends with the run, or by Ctrl-C)", flush=True)
    try:
        while any(map(is_held, runs)):
            if served.renew():
                output.write_text(served.page, encoding="utf-8")
            time.sleep(EVERY)
    finally:
        server.shutdown()
        server.server_close()
        write_report(runs, output)


class Served:
    """The page as it stands, and of which state of the folders it is."""

    def __init__(self, runs: Sequence[Path]) -> None:
        """Of some runs' folders."""
        self.runs, self.version, self.page = runs, "", ""
        self.renew()

    def renew(self) -> bool:
        """Make the page anew if something was logged, recorded or evaluated since; whether it was."""
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
            if host not in (HOST, "localhost") or found is None:  # another name that leads here is no friend
                self.send_error(404 if found is None else 403)
                return
            content = found[0].encode()
            self.send_response(200)
            self.send_header("Content-Type", f"{found[1]}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            """Nothing: the terminal is the run's."""

    return Handler
