"""Existence checks of Mooncake Store, on command: what `quarry bench lifecycle` compares itself with.

Starts a master and a store node on loopback, writes values of 4 KiB, says "ready", and then answers each line "SECONDS" on standard input with
one line: the microseconds of each batch_is_exist of 100 keys that it made in that time, separated by spaces. It ends with its input, and
takes what it started with it.
"""
import os, signal, socket, subprocess, sys, time

os.environ.setdefault("GLOG_minloglevel", "2")
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")
HOST, SEGMENT, KEYS, BATCH = "127.0.0.1", 512 << 20, 2000, 100


def free_port():
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def store(master, segment, buffer):
    from mooncake.store import MooncakeDistributedStore

    made = MooncakeDistributedStore()
    if made.setup(HOST, "P2PHANDSHAKE", segment, buffer, "tcp", "", master):
        sys.exit("the store could not be set up")
    return made


if sys.argv[1:2] == ["node"]:
    node = store(sys.argv[2], SEGMENT, 0)
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)

# Whatever the store's libraries print must not get between the answers.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
folder, children = sys.argv[1], []


def start(command, name, **pipes):
    log = open(os.path.join(folder, f"mooncake-{name}.log"), "w")
    child = subprocess.Popen(command, stderr=log, **pipes)
    children.append(child)
    return child


def stop():
    for child in children:
        child.send_signal(signal.SIGKILL)
        child.wait()


try:
    port, metrics = free_port(), free_port()
    master = f"{HOST}:{port}"
    binary = os.path.join(os.path.dirname(sys.executable), "mooncake_master")
    options = [f"--rpc_port={port}", f"--rpc_address={HOST}", f"--metrics_host={HOST}", f"--metrics_port={metrics}", "--minloglevel=1"]
    start([binary, *options], "master", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    until = time.time() + 20
    while True:
        try:
            socket.create_connection((HOST, port), 0.2).close()
            break
        except OSError:
            if time.time() > until:
                sys.exit("the master did not start")
            time.sleep(0.05)
    node = start([sys.executable, __file__, "node", master], "node", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    while node.stdout.readline().strip() != b"ready":
        if node.poll() is not None:
            sys.exit("the store node did not start")
    client = store(master, 0, 64 << 20)
    keys, value = [f"block-{number}" for number in range(KEYS)], os.urandom(4096)
    for key in keys:
        if client.put(key, value):
            sys.exit(f"{key} could not be put")
    from importlib.metadata import distributions

    found = [it.version for it in distributions() if it.metadata["Name"].startswith("mooncake-transfer-engine")]
    print("ready", (found or ["of unknown version"])[0], file=answers, flush=True)
    at = 0
    for line in sys.stdin:
        until, took = time.perf_counter() + float(line), []
        while not took or time.perf_counter() < until:
            asked = keys[at : at + BATCH]
            at = (at + BATCH) % KEYS
            begun = time.perf_counter()
            there = client.batch_is_exist(asked)
            took.append(time.perf_counter() - begun)
            if any(one != 1 for one in there):
                sys.exit("a key that was put does not exist")
        print(" ".join(f"{it * 1e6:.2f}" for it in took), file=answers, flush=True)
except BaseException as wrong:
    print(f"mooncake: {wrong!r}", file=sys.stderr, flush=True)
finally:
    # Its libraries have threads that do not end.
    stop()
    os._exit(0)
