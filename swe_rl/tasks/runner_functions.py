"""Runs plain `def test_*()` functions. A script for the sandbox: standard library only, Python >= 3.8, never imported.

    python3 -I -S runner.py --root DIR [--test-s S] [--remove-tests] [--report-fd N] ID|FILE|- ...

"-" reads more ids from standard input, one per line after the first; the first line is the nonce (else the environment
variable SWE_RL_NONCE, which is fit for framing only: code under test can read it). The report, when all is done, on
standard output or descriptor N: `NONCE begin COUNT`, a line `NONCE {"id", "status", "message"}` per test, `NONCE end
COUNT`. A status is passed, failed, error (the file does not load, a process ended) or missing.

Four kinds of process, so that code under test can make a test fail but never pass:
    reporter   holds the nonce; runs nobody's code
    keeper     forked before the nonce was read; reads test files and forks a tester per test
    tester     runs one test function. The modules of the repository are not loaded here: what a test imports from them
               is a remote object, and a call is sent to a worker, which answers with plain data or an exception's name
    worker     forked per test from a process that never saw a test file; it alone runs the repository's code
Data are sent by marshal and checked to be plain on arrival, so that an object with a false `__eq__` stays behind.
The test files can be removed before the first worker starts (--remove-tests): expected values are then nowhere to read.
"""

import _signal
import marshal
import os
import select
import sys
import time

MAX_FRAME_BYTES = 1 << 24
MESSAGE_CHARS = 240
PLAIN = (type(None), bool, int, float, complex, str, bytes)
NESTED = (tuple, list, set, frozenset)
DEV_NULL = os.open(os.devnull, os.O_RDWR)


# -- frames: 4 bytes of length, then marshal ------------------------------------------------------------------------


def send(fd, value):
    data = marshal.dumps(value)
    write_all(fd, len(data).to_bytes(4, "little") + data)


def write_all(fd, data):
    while data:
        data = data[os.write(fd, data) :]


def receive(fd, deadline=None):
    """The next value, None at the end of the stream. Raises TimeoutError at the deadline, ValueError if not plain."""
    head = read_exactly(fd, 4, deadline)
    if head is None:
        return None
    size = int.from_bytes(head, "little")
    if size > MAX_FRAME_BYTES:
        raise ValueError("answer too large")
    data = read_exactly(fd, size, deadline)
    value = None if data is None else marshal.loads(data)
    check_plain(value)
    return value


def read_exactly(fd, size, deadline):
    data = b""
    while len(data) < size:
        if deadline is not None:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if not poll.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                raise TimeoutError
        chunk = os.read(fd, size - len(data))
        if not chunk:
            return None
        data += chunk
    return data


def check_plain(value):
    kind = type(value)
    if kind in PLAIN:
        return
    if kind in NESTED:
        for item in value:
            check_plain(item)
    elif kind is dict:
        for key, item in value.items():
            check_plain(key)
            check_plain(item)
    else:
        raise ValueError("the answer is not plain data")


def is_plain(value):
    try:
        check_plain(value)
    except (ValueError, RecursionError):
        return False
    return True


def keep_only(*fds):
    """Standard streams to /dev/null and every other descriptor closed, except `fds`."""
    for stream in (0, 1, 2):
        os.dup2(DEV_NULL, stream)
    start = 3
    for fd in sorted(fds):
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, 4096)


# -- workers: the repository's side -----------------------------------------------------------------------------------


def serve_repository(root, requests, replies):
    """Forks a worker for each ("begin", number, limit_s); other requests at this level are left-overs of a dead one."""
    keep_only(requests, replies)
    sys.path.insert(0, root)
    sys.path_hooks.insert(0, source_finder(root))
    os.chdir(root)
    compile("def f(a):\n    return a[1:]\n", "", "exec")  # the parser's own set-up, once instead of in each worker
    while True:
        request = receive(requests)
        if request is None:
            return
        if request[0] != "begin":
            continue
        number, limit_s = request[1:]
        worker = os.fork()
        if worker == 0:
            os.setsid()
            work(number, requests, replies)
            os._exit(0)
        wait(worker, limit_s)
        send(replies, (number, "gone", None))


def wait(worker, limit_s):
    """Until the worker has ended, by itself or at the limit; what it started goes with it."""
    _signal.signal(_signal.SIGALRM, lambda *_: kill_group(worker))
    _signal.setitimer(_signal.ITIMER_REAL, limit_s)
    os.waitpid(worker, 0)
    _signal.setitimer(_signal.ITIMER_REAL, 0)
    kill_group(worker)


def source_finder(root):
    """Path hook that compiles every module below `root`: a stale or forged __pycache__ there is never read."""
    import _frozen_importlib_external as external

    class SourceOnly(external.SourceFileLoader):
        def get_code(self, name):
            path = self.get_filename(name)
            return compile(self.get_data(path), path, "exec", dont_inherit=True)

    def hook(path):
        if path != root and not path.startswith(root + "/"):
            raise ImportError(path)
        return external.FileFinder(path, (SourceOnly, [".py"]))

    return hook


def kill_group(pid):
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, _signal.SIGKILL)
        except OSError:
            pass  # ended already, or not yet a group of its own


def work(number, requests, replies):
    known = []  # objects that a test may refer to by their place
    while True:
        request = receive(requests)
        if request is None or request[0] == "end":
            return
        try:
            value = answer(request, known)
            reply = ("value", value) if is_plain(value) else ("object", remember(value, known))
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: a test must see them as failures
            reply = ("raise", (type(error).__name__, describe(error)))
        send(replies, (number, *reply))


def answer(request, known):
    action, subject = request[0], request[1]
    if action == "import":
        __import__(subject)
        return sys.modules[subject]
    if action == "call":
        args = [known[item] if is_reference else item for is_reference, item in request[2]]
        return known[subject](*args, **request[3])
    return attribute(known[subject], request[2])


def attribute(owner, name):
    if not hasattr(owner, name) and isinstance(owner, type(sys)):
        try:
            __import__(owner.__name__ + "." + name)  # `from package import module`
        except ModuleNotFoundError as error:
            if error.name != owner.__name__ + "." + name:
                raise
    return getattr(owner, name)


def remember(value, known):
    known.append(value)
    return len(known) - 1


def describe(error):
    try:
        return str(error)[:MESSAGE_CHARS]
    except BaseException:
        return ""


# -- tester: the test's side ------------------------------------------------------------------------------------------


class Remote:
    """Stands for an object in the worker. Attributes that are plain data are fetched, others are remote again."""

    def __init__(self, link, place):
        self.__dict__.update(_link=link, _place=place)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask("get", self._place, name)

    def __call__(self, *args, **keywords):
        sent = [(True, arg._place) if type(arg) is Remote else (False, arg) for arg in args]
        result = self._link.ask("call", self._place, sent, keywords)
        self._link.last = repr(result)
        return result


class Link:
    """The tester's end of the two pipes."""

    def __init__(self, requests, replies, number, limit_s):
        self.requests, self.replies, self.number = requests, replies, number
        self.deadline = time.monotonic() + limit_s
        self.last = None
        send(requests, ("begin", number, limit_s))

    def ask(self, *request):
        send(self.requests, request)
        while True:
            reply = receive(self.replies, self.deadline)
            if reply is None:
                raise RuntimeError("the worker is gone")
            number, kind, value = reply
            if number == self.number:
                break
        if kind == "value":
            return value
        if kind == "object":
            return Remote(self, value)
        if kind == "raise":
            raise rebuilt(*value)
        raise TimeoutError if time.monotonic() > self.deadline - 0.02 else RuntimeError("the process under test ended")

    def end(self):
        """Ends the worker and waits until its parent is ready for the next one."""
        send(self.requests, ("end",))
        while True:
            reply = receive(self.replies, self.deadline + 1)
            if reply is None or reply[:2] == (self.number, "gone"):
                return


def rebuilt(name, message):
    kind = __builtins__.__dict__.get(str(name))
    if isinstance(kind, type) and issubclass(kind, Exception) and kind is not AssertionError:
        try:
            return kind(message)
        except TypeError:
            pass  # UnicodeDecodeError and others want more arguments
    return RuntimeError(f"{name}: {message}")


def importer(link, root):
    """`__import__` of a test file: modules of the repository are remote, the others are the interpreter's own."""

    def load(name, namespace=None, scope=None, names=(), level=0):
        if level:
            raise ImportError("relative imports are not supported in test files")
        top = name.partition(".")[0]
        if not os.path.exists(os.path.join(root, top)) and not os.path.exists(os.path.join(root, top + ".py")):
            return __import__(name, namespace, scope, names, level)
        module = link.ask("import", name)
        return module if names or "." not in name else link.ask("import", top)

    return load


def run_test(code, source, path, name, link, root):
    """(status, message) of one test function. code: of the whole file, None when it does not compile."""
    names = dict(__builtins__.__dict__, __import__=importer(link, root))
    scope = {"__name__": "test", "__file__": path, "__builtins__": names}
    try:
        exec(code or compile(source, path, "exec"), scope)
    except BaseException as error:
        return "error", explain(error, source, path, link)
    function = scope.get(name)
    if not callable(function) or type(function) is Remote:
        return "missing", "no such test function"
    try:
        function()
    except BaseException as error:
        return "failed", explain(error, source, path, link)
    return "passed", ""


def explain(error, source, path, link):
    """`assert f(2) == 3: got 4`, or the line and the exception."""
    trace, number = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            number = trace.tb_lineno
        trace = trace.tb_next
    lines = source.decode("utf-8", "replace").split("\n")
    line = lines[number - 1].strip() if number else ""
    if isinstance(error, TimeoutError):
        reason = "time limit"
    elif type(error) is AssertionError and not error.args and link.last is not None:
        reason = "got " + link.last
    else:
        reason = (type(error).__name__ + ": " + describe(error)).rstrip(": ")
    return ((line + ": " if line else "") + reason)[:MESSAGE_CHARS]


# -- keeper: which tests, one tester each ---------------------------------------------------------------------------


def keep(options, jobs, results):
    """Reads the ids from `jobs`, sends (id, status, message) per test to `results`."""
    to_worker, requests = os.pipe()
    replies, from_worker = os.pipe()
    if os.fork() == 0:
        serve_repository(options["root"], to_worker, from_worker)
        os._exit(0)
    os.close(to_worker)
    os.close(from_worker)
    wanted = receive(jobs)
    sources = {path: read_source(options["root"], path) for path in {item.partition("::")[0] for item in wanted}}
    codes = {path: compiled(source, path) for path, source in sources.items()}
    if options["remove-tests"]:
        for path in sources:
            remove(os.path.join(options["root"], path))
    for number, test_id in enumerate(expand(wanted, sources)):
        path, _, name = test_id.partition("::")
        if sources[path] is None:
            send(results, (test_id, "missing", "no such file"))
        else:
            test = (codes[path], sources[path], path, name)
            send(results, (test_id, *fork_tester(options, test, number, requests, replies)))


def fork_tester(options, test, number, requests, replies):
    """Runs one test in a process of its own and waits for its verdict, a little more than the time limit at most."""
    limit_s = options["test-s"]
    verdict, sink = os.pipe()
    tester = os.fork()
    if tester == 0:
        os.setsid()
        keep_only(requests, replies, sink)
        link = Link(requests, replies, number, limit_s)
        send(sink, run_test(*test, link, options["root"]))
        link.end()
        os._exit(0)
    os.close(sink)
    try:
        result = receive(verdict, time.monotonic() + limit_s + 0.5)
        read_exactly(verdict, 1, time.monotonic() + limit_s + 1.5)  # until the worker is gone
    except TimeoutError:
        result = ("failed", "time limit")
    except ValueError as error:
        result = ("error", str(error))
    kill_group(tester)
    os.waitpid(tester, 0)
    os.close(verdict)
    return result or ("error", "the process under test ended")


def compiled(source, path):
    try:
        return compile(source or b"", path, "exec")
    except (SyntaxError, ValueError):
        return None  # the tester meets the error again and reports it


def expand(wanted, sources):
    """Ids as they are; a file becomes the ids of its top-level test functions, in their order."""
    for item in wanted:
        if "::" in item or sources[item] is None:
            yield item
            continue
        try:
            body = compile(sources[item], item, "exec", 0x400).body  # 0x400: syntax tree only
        except (SyntaxError, ValueError):
            yield item + "::(file)"
            continue
        for node in body:
            if type(node).__name__ == "FunctionDef" and node.name.startswith("test"):
                yield item + "::" + node.name


def read_source(root, path):
    try:
        with open(os.path.join(root, path), "rb") as file:
            return file.read()
    except OSError:
        return None


def remove(path):
    try:
        os.unlink(path)
    except OSError:
        pass  # was not there


# -- reporter ---------------------------------------------------------------------------------------


def hide_memory():
    """PR_SET_DUMPABLE 0: processes of the same user may not read this one's memory or open its descriptors."""
    try:
        import _ctypes

        prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")
        _ctypes.call_function(prctl, (4, 0, 0, 0, 0))
    except (ImportError, OSError, AttributeError):
        pass  # an interpreter without it: the sandbox's own ptrace limits remain


def quoted(text):
    """A JSON string. Importing json would cost as much as the whole run."""
    units = text.encode("utf-16-be", "surrogatepass")
    codes = [int.from_bytes(units[place : place + 2], "big") for place in range(0, len(units), 2)]
    plain = [32 <= code < 127 and code not in b'"\\' for code in codes]
    return '"' + "".join(chr(code) if keep else f"\\u{code:04x}" for code, keep in zip(codes, plain)) + '"'


def parse(arguments):
    options = {"root": ".", "test-s": 5.0, "remove-tests": False, "report-fd": 1}
    kinds = {"root": str, "test-s": float, "report-fd": int}
    ids = []
    rest = list(arguments)
    while rest:
        item = rest.pop(0)
        key = item[2:]
        if item == "--remove-tests":
            options[key] = True
        elif item.startswith("--") and key in kinds and rest:
            options[key] = kinds[key](rest.pop(0))
        elif item.startswith("--"):
            raise SystemExit("unknown option " + item)
        else:
            ids.append(item)
    options["root"] = os.path.abspath(options["root"])
    return options, ids


def read_all(fd):
    chunks = []
    while True:
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)


def main():
    options, ids = parse(sys.argv[1:])
    nonce = os.environ.pop("SWE_RL_NONCE", "")
    sys.dont_write_bytecode = True
    hide_memory()
    jobs, to_keeper = os.pipe()
    results, from_keeper = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        keep_only(jobs, from_keeper)
        keep(options, jobs, from_keeper)
        os._exit(0)
    os.close(from_keeper)
    if "-" in ids or not nonce:
        lines = read_all(0).decode().split("\n")
        nonce = lines[0] or nonce
        if "-" in ids:
            ids = [item for item in ids if item != "-"] + [line for line in lines[1:] if line]
    send(to_keeper, ids)
    report(collect(results), ids, nonce, options)
    kill_group(keeper)
    os._exit(0)  # nothing to tear down: saves the interpreter's own end


def collect(results):
    rows = []
    while True:
        row = receive(results)
        if row is None:
            return rows
        rows.append(row)


def report(rows, ids, nonce, options):
    """An id without a row is missing; an id with two rows can only be a fault, so the worse one counts."""
    found = {}
    for test_id, status, message in rows:
        if test_id not in found or status != "passed":
            found[test_id] = (status, message)
    for item in ids:
        if "::" in item:
            found.setdefault(item, ("missing", "not run"))
    lines = ["", f"{nonce} begin {len(found)}"]
    for test_id, (status, message) in found.items():
        lines.append(f'{nonce} {{"id": {quoted(test_id)}, "status": "{status}", "message": {quoted(message)}}}')
    lines += [f"{nonce} end {len(found)}", ""]
    write_all(options["report-fd"], "\n".join(lines).encode())


main()
