"""Runs the pods of a rendered set of manifests as plain processes on this host: try_nodes.py MANIFESTS.yaml BINARIES

Each pod gets its files with the owner and mode that a kubelet gives them, its init container runs, its environment is filled in, its probes are asked;
the bootstrap job makes the cluster, and a value is put and got. What is tried is what no schema says: that a pod finds its number, its keys and its
addresses. Runs as root in network and mount namespaces of its own, so that pods have names and addresses and nothing else is reached. Whatever it
started has ended when it ends.
"""

import base64, http.client, os, pathlib, re, shutil, signal, subprocess, sys, tempfile, time

import yaml

USER = 7400
PATIENCE_S = 60


def main():
    manifests, binaries = sys.argv[1], sys.argv[2]
    if os.environ.get("TRY_NODES_INSIDE") != "yes":
        inside = dict(os.environ, TRY_NODES_INSIDE="yes")
        command = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, *sys.argv]
        sys.exit(subprocess.run(command, env=inside).returncode)
    with tempfile.TemporaryDirectory(prefix="quarry-pods-", dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        Cluster(pathlib.Path(folder), pathlib.Path(manifests), pathlib.Path(binaries)).try_it()


class Cluster:
    def __init__(self, folder, manifests, binaries):
        self.folder = folder
        self.files = manifests.parent / "kubernetes/overlays/example/files"
        self.objects = [it for it in yaml.safe_load_all(manifests.read_text()) if it]
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ("quarry", "raft-admin"):
            shutil.copy(binaries / name, self.bin / name)
        self.running = {}

    def of_kind(self, kind):
        return [it for it in self.objects if it["kind"] == kind]

    def named(self, kind, name):
        return next(it for it in self.of_kind(kind) if it["metadata"]["name"] == name)

    def check_policies(self):
        """Clients and Prometheus are let in by their own label alone: kustomize must not have added ours to what they need."""
        found = set()
        for policy in self.of_kind("NetworkPolicy"):
            peers = [peer["podSelector"] for rule in policy["spec"]["ingress"] for peer in rule.get("from", []) if "podSelector" in peer]
            for peer in peers:
                keys = set(peer.get("matchLabels", {})) | {it["key"] for it in peer.get("matchExpressions", [])}
                foreign = {key for key in keys if key.startswith("quarry.io/")}
                assert not foreign or keys == foreign, f'{policy["metadata"]["name"]} lets in only pods with {sorted(keys)}'
                found |= foreign
        assert found == {"quarry.io/client", "quarry.io/monitoring"}, f"who is let in: {found}"

    def try_it(self):
        self.check_policies()
        sets = self.of_kind("StatefulSet")
        pods = [(it, ordinal) for it in sets for ordinal in range(it["spec"]["replicas"])]
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        names = {}
        for number, (it, ordinal) in enumerate(pods):
            pod = f'{it["metadata"]["name"]}-{ordinal}'
            names[pod] = (f'127.0.1.{number + 1}', f'{pod}.{it["spec"]["serviceName"]}.{it["metadata"]["namespace"]}.svc')
        hosts = self.folder / "hosts"
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for ip, name in names.values()))
        subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
        for it, ordinal in pods:
            pod = f'{it["metadata"]["name"]}-{ordinal}'
            self.start(it, pod, names[pod][0])
        for pod, (_, container, ip) in self.running.items():
            self.probe(pod, container, ip, "startupProbe")
        self.job(self.of_kind("Job")[0])
        for pod, (_, container, ip) in self.running.items():
            self.probe(pod, container, ip, "readinessProbe")
            self.probe(pod, container, ip, "livenessProbe")
        client = dict(PATH=str(self.bin), QUARRY_CLUSTER=str(self.files / "cluster.toml"), QUARRY_NAMESPACE="tried")
        admin = dict(client, QUARRY_CREDENTIALS=str(self.files / "admin.pem"))
        client["QUARRY_CREDENTIALS"] = str(self.files / "client.pem")
        run = lambda env, *command, **more: subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=PATIENCE_S, **more).stdout
        until = time.monotonic() + PATIENCE_S
        while subprocess.run([self.bin / "raft-admin", "health"], env=admin, capture_output=True, text=True).stdout.strip() != "healthy":
            assert time.monotonic() < until, "the cluster is not healthy"
            time.sleep(0.2)
        run(admin, str(self.bin / "quarry"), "namespace", "create", "tried")
        run(client, str(self.bin / "quarry"), "put", "key", "-", input="value of a pod")
        assert run(client, str(self.bin / "quarry"), "get", "key") == "value of a pod"
        for pod, (process, _, _) in self.running.items():
            process.send_signal(signal.SIGTERM)
        for pod, (process, _, _) in self.running.items():
            assert process.wait(timeout=45) == 0, f"{pod} ended with {process.returncode}"
        print(f"{len(self.running)} pods found their numbers, keys and addresses: {', '.join(self.running)}")

    def volumes(self, pod, spec):
        """Where each volume of a pod is here, with what a kubelet puts into it."""
        places = {}
        for volume in spec["volumes"]:
            place = self.folder / pod / volume["name"]
            place.mkdir(parents=True)
            held, mode = {}, 0o644
            if "configMap" in volume:
                held = {name: text.encode() for name, text in self.named("ConfigMap", volume["configMap"]["name"])["data"].items()}
            elif "secret" in volume:
                mode = volume["secret"]["defaultMode"]
                held = {name: base64.b64decode(text) for name, text in self.named("Secret", volume["secret"]["secretName"])["data"].items()}
            else:
                os.chown(place, 0, spec["securityContext"]["fsGroup"])
                place.chmod(0o2770)
            for name, data in held.items():
                (place / name).write_bytes(data)
                os.chown(place / name, 0, spec["securityContext"]["fsGroup"])
                (place / name).chmod(mode)
            places[volume["name"]] = place
        return places

    def claims(self, it, pod, places):
        for claim in it["spec"].get("volumeClaimTemplates", []):
            place = self.folder / pod / claim["metadata"]["name"]
            place.mkdir()
            os.chown(place, 0, it["spec"]["template"]["spec"]["securityContext"]["fsGroup"])
            place.chmod(0o2770)
            places[claim["metadata"]["name"]] = place

    @staticmethod
    def moved(container, places):
        """Replaces the paths in a container by where its volumes are here."""
        mounts = sorted(((it["mountPath"], str(places[it["name"]])) for it in container["volumeMounts"]), reverse=True)

        def move(text):
            for path, place in mounts:
                text = re.sub(re.escape(path) + r"(?=/|\b)", place, text)
            return text

        return move

    def command(self, container, places, env):
        move = self.moved(container, places)
        words = container.get("command", [str(self.bin / "quarry")]) + container.get("args", [])
        words = [move(word) for word in words]
        ids = [f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        return ["setpriv", *ids, "--", *words], dict(env, PATH=f"{self.bin}:/usr/bin:/bin")

    @staticmethod
    def environment(container, fields):
        env = {}
        for it in container.get("env", []):
            if "valueFrom" in it:
                env[it["name"]] = fields[it["valueFrom"]["fieldRef"]["fieldPath"]]
            else:
                env[it["name"]] = re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], it["value"])
        return env

    def start(self, it, pod, ip):
        spec = it["spec"]["template"]["spec"]
        places = self.volumes(pod, spec)
        self.claims(it, pod, places)
        fields = {"metadata.name": pod, "metadata.namespace": it["metadata"]["namespace"], "status.podIP": ip}
        for init in spec["initContainers"]:
            command, env = self.command(init, places, self.environment(init, fields))
            subprocess.run(command, env=env, check=True, timeout=PATIENCE_S)
        container = spec["containers"][0]
        move = self.moved(container, places)
        for name in os.listdir(places["config"]):
            path = places["config"] / name
            path.write_text(move(path.read_text()))
        env = self.environment(container, fields)
        # All pods share this host: each listens at its own address, at the ports that it says.
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        env["QUARRY_NODE__LISTEN"] = f'{ip}:{ports["grpc"]}'
        env["QUARRY_ADMIN__LISTEN"] = f'{ip}:{ports["admin"]}'
        # And its memory.
        if "datanode" in pod:
            env["QUARRY_MEMORY__REGION_BYTES"] = "[16777216]"
        command, env = self.command(container, places, env)
        log = open(self.folder / f"{pod}.log", "w")
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        self.running[pod] = (process, container, ip)

    def probe(self, pod, container, ip, which):
        probe = container[which]["httpGet"]
        port = next(it["containerPort"] for it in container["ports"] if it["name"] == probe["port"])
        until, last = time.monotonic() + PATIENCE_S, None
        while time.monotonic() < until:
            try:
                connection = http.client.HTTPConnection(ip, port, timeout=5)
                connection.request("GET", probe["path"])
                answer = connection.getresponse()
                last = (answer.status, answer.read())
                if answer.status == 200:
                    return
            except OSError as wrong:
                last = wrong
            time.sleep(0.1)
        raise SystemExit(f"{pod} {which}: {last}\n{(self.folder / f'{pod}.log').read_text()[-2000:]}")

    def job(self, job):
        spec = job["spec"]["template"]["spec"]
        places = self.volumes(job["metadata"]["name"], spec)
        command, env = self.command(spec["containers"][0], places, {})
        subprocess.run(command, env=env, check=True, timeout=PATIENCE_S)


main()
