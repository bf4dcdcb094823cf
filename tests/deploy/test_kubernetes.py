"""The Kubernetes manifests: rights, retries, network policies, and the plans of Trainbox."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from entrypoint.health.limits import read_limits
from entrypoint.launch.children import STOP_BUDGET_S
from tests.support.commands import Ended, Trainbox, clean_environment
from tests.support.nvml_stub.build import stub_env, write_config
from tests.support.sweep_options import requested_sweep

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy/kubernetes"
PAGE = ROOT / "docs/guides/kubernetes.md"
KUSTOMIZE = next(
    (tool for tool in (["kubectl", "kustomize"], ["kustomize", "build"]) if shutil.which(tool[0])),
    [],
)
pytestmark = pytest.mark.skipif(not KUSTOMIZE, reason="no kubectl and no kustomize on PATH")

JOBS = ("base", "one-node", "several-nodes", "sweep")
TRAININGS = (*JOBS, "jobset", "trainjob-runtime")
MULTI_NODE = ("several-nodes", "jobset", "trainjob")
OVERLAYS = ("one-node", "several-nodes", "sweep", "jobset", "trainjob")
OTHERS = ("trainjob", "tensorboard", "monitor", "storage", "storage-one-node")
JOB_NAME, JOBSET_NAME = "batch.kubernetes.io/job-name", "jobset.sigs.k8s.io/jobset-name"


Object = dict[str, Any]


@cache
def objects(folder: Path) -> list[Object]:
    """Return the objects that `kubectl apply -k` would send."""
    done = subprocess.run([*KUSTOMIZE, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def one(folder: Path, kind: str) -> Object:
    (found,) = (thing for thing in objects(folder) if thing["kind"] == kind)
    return found


def job_of(folder: Path) -> Object:
    """Return the folder's Job, or the Job of its JobSet or training runtime, as {spec: ...}."""
    for thing in objects(folder):
        if thing["kind"] == "Job":
            return thing
    (replicated,) = jobset_of(folder)["replicatedJobs"]
    job: Object = replicated["template"]
    return job


def jobset_of(folder: Path) -> Object:
    """Return the `spec` of the folder's JobSet, or of the JobSet of its training runtime."""
    (jobset, *_) = [thing for thing in objects(folder) if thing["kind"] == "JobSet"] or [
        one(folder, "ClusterTrainingRuntime")["spec"]["template"]
    ]
    spec: Object = jobset["spec"]
    return spec


def template_of(folder: Path) -> Object:
    """Return the pod template of the folder's Job, JobSet, runtime, Deployment or DaemonSet."""
    services = [thing for thing in objects(folder) if thing["kind"] in ("Deployment", "DaemonSet")]
    template: Object = (services or [job_of(folder)])[0]["spec"]["template"]
    return template


# Security.


def test_all_folders_are_tested() -> None:
    folders = {path.parent.name for path in DEPLOY.glob("*/kustomization.yaml")}
    assert folders == {*TRAININGS, *OTHERS}
    kinds = {thing["kind"] for folder in DEPLOY.iterdir() for thing in objects(folder)} - {
        "ConfigMap"
    }
    assert kinds == {
        *("Job", "JobSet", "TrainJob", "ClusterTrainingRuntime", "Deployment", "DaemonSet"),
        *("Service", "NetworkPolicy", "PersistentVolumeClaim"),
    }


@pytest.mark.parametrize("name", [*TRAININGS, "tensorboard", "monitor"])
def test_pod_security_restricted_admits_the_pod(name: str) -> None:
    """The pod has only keys that are known to be allowed.

    A namespace, a port or a path of the host would be a new key.
    """
    template = template_of(DEPLOY / name)
    spec = template["spec"]
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "fsGroup": 1000,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    keys = "securityContext automountServiceAccountToken enableServiceLinks restartPolicy subdomain"
    keys += " terminationGracePeriodSeconds tolerations nodeSelector runtimeClassName"
    keys += " initContainers containers volumes"
    assert spec.keys() <= set(keys.split())
    assert template["metadata"].keys() == {"labels"}, "an annotation can lift AppArmor"
    for volume in spec["volumes"]:
        assert volume.keys() - {"name"} <= {"configMap", "emptyDir", "persistentVolumeClaim"}
    for container in spec.get("initContainers", []) + spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        keys = "name image command args env envFrom resources securityContext volumeMounts"
        assert container.keys() <= {*keys.split(), "livenessProbe", "readinessProbe", "ports"}
        assert all(port.keys() == {"name", "containerPort"} for port in container.get("ports", []))
        assert container.get("readinessProbe", {}).get("httpGet", {}).keys() <= {"path", "port"}
        assert {"cpu", "memory"} <= container["resources"]["limits"].keys()


def test_jobset_and_trainjob_have_the_pod_of_the_job() -> None:
    base, jobset, runtime = (
        job_of(DEPLOY / name)["spec"]["template"] for name in ("base", "jobset", "trainjob-runtime")
    )
    per_kind = ("name", "env", "envFrom")  # where the settings and the rank come from

    def common(template: Object) -> Object:
        spec = {
            key: value for key, value in template["spec"].items() if not key.endswith("ontainers")
        }
        for kind in ("initContainers", "containers"):
            (container,) = template["spec"][kind]
            spec[kind] = {key: value for key, value in container.items() if key not in per_kind} | {
                "image": "any"
            }
        return spec | {"labels": template["metadata"]["labels"]}

    assert common(base) == common(jobset) == common(runtime)


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_pod(name: str) -> None:
    spec = job_of(DEPLOY / name)["spec"]["template"]["spec"]
    assert spec["restartPolicy"] == "Never", "podFailurePolicy requires Never"
    assert spec["terminationGracePeriodSeconds"] >= STOP_BUDGET_S + 10
    (health,), (train,) = spec["initContainers"], spec["containers"]
    assert health["args"] == ["health", "--gate"]
    assert health["resources"] == train["resources"]
    assert health["resources"].keys() == {"limits"}, "requests then equal the limits"
    assert isinstance(health["resources"]["limits"]["nvidia.com/gpu"], int)
    assert health["volumeMounts"] == train["volumeMounts"]
    mounts = {
        mount["mountPath"]: (mount["name"], mount.get("readOnly", False))
        for mount in train["volumeMounts"]
    }
    assert mounts == {
        "/workspace/runs": ("runs", False),
        "/workspace/data": ("data", False),
        "/workspace/my_tasks": ("tasks", True),
        "/dev/shm": ("shm", False),
        "/tmp": ("tmp", False),
    }
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["runs"]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert volumes["data"]["persistentVolumeClaim"] == {"claimName": "data"}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert volumes["tasks"]["configMap"]["optional"] is True
    assert train["livenessProbe"]["exec"]["command"] == ["trainbox", "health", "--live"]
    assert train["livenessProbe"]["timeoutSeconds"] == 15, "a driver is given up after 10 s"


def test_the_volumes_are_apart_from_the_jobs_and_any_node_can_mount_them() -> None:
    claims = {
        claim["metadata"]["name"]: claim["spec"]["accessModes"]
        for claim in objects(DEPLOY / "storage")
    }
    assert claims == {"runs": ["ReadWriteMany"], "data": ["ReadWriteMany"]}
    storage, one_node = (objects(DEPLOY / name) for name in ("storage", "storage-one-node"))
    for claim in (copied := json.loads(json.dumps(storage))):
        claim["spec"]["accessModes"] = ["ReadWriteOnce"]
    assert one_node == copied
    for name in (*OVERLAYS, "tensorboard"):
        assert "PersistentVolumeClaim" not in {thing["kind"] for thing in objects(DEPLOY / name)}


def test_tensorboard_reads_takes_no_gpu_and_is_reached_by_no_pod() -> None:
    deployment, service, policy = (
        one(DEPLOY / "tensorboard", kind) for kind in ("Deployment", "Service", "NetworkPolicy")
    )
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert {"name": "runs", "mountPath": "/workspace/runs", "readOnly": True} in container[
        "volumeMounts"
    ]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert container["env"] == [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
    assert container["args"][0] == "tensorboard"
    assert (
        str(container["ports"][0]["containerPort"])
        == container["args"][container["args"].index("--port") + 1]
    )
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    assert service["spec"].get("type", "ClusterIP") == "ClusterIP"
    assert policy["spec"] == {"podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress"]}


def test_the_monitor_sees_all_gpus_without_a_request_and_is_reached_by_prometheus() -> None:
    daemons, policy = (one(DEPLOY / "monitor", kind) for kind in ("DaemonSet", "NetworkPolicy"))
    (container,) = daemons["spec"]["template"]["spec"]["containers"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"} in container["env"]
    assert container["args"][:3] == ["health", "--monitor", "--gpus=all"]
    assert "--listen=$(POD_IP):9400" in container["args"]
    pod_ip = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    assert pod_ip in container["env"]
    assert container["ports"] == [{"name": "http", "containerPort": 9400}]
    labels = daemons["spec"]["template"]["metadata"]["labels"]
    assert daemons["spec"]["selector"]["matchLabels"] == labels
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    (rule,) = policy["spec"]["ingress"]
    assert rule["ports"] == [{"port": "http"}]
    assert len(rule["from"]) == 1
    changed = read_limits(DEPLOY / "monitor/limits.toml").overridden()
    assert set(changed) == {"memory_mib_per_process", "shm_mib_per_process", "disk_mib"}


# Retries.


def fate(job: Object, *ends: tuple[str, int], disrupted: bool = False) -> str:
    """Return the action of the Job controller for these exit codes of a pod's containers.

    The action is Count if no rule matches.
    """
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes:
            named = [code for name, code in ends if name == codes["containerName"] and code]
            assert codes["operator"] in ("In", "NotIn")
            if any((code in codes["values"]) == (codes["operator"] == "In") for code in named):
                return str(rule["action"])
        elif disrupted:
            assert rule["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
            return str(rule["action"])
    return "Count"


def who_retries() -> dict[int, str]:
    """Return who should retry each exit code, by docs/reference/exit-codes.md."""
    rows = re.findall(
        r"^\| (\d+) \|.*\| ([^|]*) \|$",
        (ROOT / "docs/reference/exit-codes.md").read_text(),
        re.MULTILINE,
    )
    return {int(code): who for code, who in rows}


@pytest.mark.parametrize("name", TRAININGS)
def test_retries_follow_the_page_of_exit_codes(name: str) -> None:
    job = job_of(DEPLOY / name)
    (health,), (train,) = (
        job["spec"]["template"]["spec"][kind] for kind in ("initContainers", "containers")
    )
    expected = {
        "after manual action": "FailJob",
        "no": "FailJob",
        "by the scheduler, at once": "Ignore",
    }
    codes = who_retries()
    assert codes.keys() == {1, 2, 3, 4, 5, 6, 7, 8, 75}
    for code, who in codes.items():
        assert who in expected or who.startswith("by the scheduler")
        assert fate(job, ("health", 0), (train["name"], code)) == expected.get(who, "Count"), (
            code,
            who,
        )
    by_signals = range(129, 160)
    by_kubernetes = (128, 255)  # the container could not be started, or was lost with its node
    assert {fate(job, (train["name"], code)) for code in (*by_signals, *by_kubernetes)} == {"Count"}
    assert {fate(job, (train["name"], code)) for code in (9, 42, 125, 127, 254)} == {"FailJob"}
    assert fate(job, ("health", 0), (train["name"], 137), disrupted=True) == "Ignore"
    assert fate(job, ("health", 0), (train["name"], 2), disrupted=True) == "FailJob"
    assert fate(job, (health["name"], 1)) == "Count", "another node may be healthy"
    assert fate(job, (health["name"], 2)) == "FailJob", "a wrong option"
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        values = rule.get("onExitCodes", {"values": []})["values"]
        assert values == sorted(set(values)), "the API requires sorted values"


def test_the_number_of_retries() -> None:
    limits = {
        name: {k: v for k, v in job_of(DEPLOY / name)["spec"].items() if k.startswith("backoff")}
        for name in JOBS
    }
    assert limits == {
        "base": {"backoffLimit": 6},
        "one-node": {"backoffLimit": 6},
        "several-nodes": {"backoffLimit": 50},
        "sweep": {"backoffLimitPerIndex": 3},
    }
    assert one(DEPLOY / "sweep", "Job")["spec"]["successPolicy"] == {
        "rules": [{"succeededIndexes": "0"}]
    }
    for folder in ("jobset", "trainjob-runtime"):
        assert job_of(DEPLOY / folder)["spec"]["backoffLimit"] == 0, (
            "if a pod fails, all pods restart"
        )
        spec = jobset_of(DEPLOY / folder)
        (rule,) = spec["failurePolicy"]["rules"]
        assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
        assert spec["failurePolicy"]["maxRestarts"] == 10


# The environment of the containers, as the controllers and the kubelet set it.


@dataclass(frozen=True)
class Pod:
    """A pod of a job: the environment of its containers, and its labels."""

    labels: dict[str, str]
    address: str
    spec: Object
    env: dict[str, dict[str, str]]

    @property
    def train(self) -> Object:
        container: Object = self.spec["containers"][0]
        return container

    @property
    def gpus(self) -> int:
        return int(self.train["resources"]["limits"]["nvidia.com/gpu"])


def environment(
    container: Object, folder: Path, labels: dict[str, str], index: int | None
) -> dict[str, str]:
    """Return the variables of a container: ConfigMaps, the index, then `env` in its order."""
    env = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    for source in container.get("envFrom", []):
        name = source["configMapRef"]["name"]
        found = [
            t["data"]
            for t in objects(folder)
            if t["kind"] == "ConfigMap" and t["metadata"]["name"] == name
        ]
        assert len(found) == 1 or (not found and source["configMapRef"].get("optional"))
        env |= dict(*found)
    annotations = {}
    if index is not None:
        env["JOB_COMPLETION_INDEX"] = annotations["batch.kubernetes.io/job-completion-index"] = str(
            index
        )
    for entry in container.get("env", []):
        if "valueFrom" in entry:
            path = entry["valueFrom"]["fieldRef"]["fieldPath"]
            kind, key = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path).groups()
            env[entry["name"]] = {"labels": labels, "annotations": annotations}[kind][key]
        else:
            assert isinstance(entry["value"], str)
            env[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda match: env[match[1]], entry["value"])
    return env


def pods(folder: Path) -> list[Pod]:
    """Return the pods of the folder's job."""
    kinds = {thing["kind"]: thing for thing in objects(folder)}
    if "TrainJob" in kinds:
        return _pods_of_trainjob(kinds["TrainJob"], folder)
    job, labels = job_of(folder), {}
    name, subdomain = "", job["spec"]["template"]["spec"].get("subdomain", "")
    if "JobSet" in kinds:
        subdomain = kinds["JobSet"]["metadata"]["name"]
        name, labels = f"{subdomain}-node-0", {JOBSET_NAME: subdomain}
    else:
        name = job["metadata"]["name"]
    return _made(job["spec"], name, subdomain, labels, folder)


def _pods_of_trainjob(trainjob: Object, folder: Path) -> list[Pod]:
    """Merge a TrainJob into its runtime as the plugins of Kubeflow Trainer do."""
    runtime = one(folder.parent / "trainjob-runtime", "ClusterTrainingRuntime")
    assert trainjob["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert trainjob["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    trainer, name = trainjob["spec"]["trainer"], trainjob["metadata"]["name"]
    (replicated,) = json.loads(json.dumps(runtime["spec"]["template"]["spec"]["replicatedJobs"]))
    assert (replicated["name"], replicated["replicas"]) == ("node", 1)
    assert (
        replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"]
        == "trainer"
    )
    spec = replicated["template"]["spec"]
    (node,) = (c for c in spec["template"]["spec"]["containers"] if c["name"] == "node")
    node["resources"] = trainer["resourcesPerNode"]
    node["args"] = trainer.get("args", node["args"])
    given = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": "auto",
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
    }
    rank = {
        "fieldRef": {
            "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        }
    }
    told = [
        *trainer["env"],
        {"name": "PET_NODE_RANK", "valueFrom": rank},
        *({"name": n, "value": given[n]} for n in given),
    ]
    node["env"] = [
        entry for entry in node["env"] if entry["name"] not in {e["name"] for e in told}
    ] + told
    spec |= {"completions": trainer["numNodes"], "parallelism": trainer["numNodes"]}
    return _made(spec, f"{name}-node-0", name, {JOBSET_NAME: name}, folder)


def _made(
    spec: Object, job: str, subdomain: str, labels: dict[str, str], folder: Path
) -> list[Pod]:
    indexed = spec.get("completionMode") == "Indexed"
    assert spec.get("completions", 1) == spec.get("parallelism", 1), "all pods must run at once"
    made = []
    for index in range(spec.get("completions", 1)):
        own = {**spec["template"]["metadata"]["labels"], **labels, JOB_NAME: job}
        containers = (
            spec["template"]["spec"]["initContainers"] + spec["template"]["spec"]["containers"]
        )
        env = {
            c["name"]: environment(c, folder, own, index if indexed else None) for c in containers
        }
        made.append(Pod(own, f"{job}-{index}.{subdomain}", spec["template"]["spec"], env))
    return made


Run = Callable[..., Ended]


@pytest.fixture
def run(library: Path, forked: Trainbox, tmp_path: Path) -> Run:
    """Run `trainbox` with a container's environment on a node with the pod's GPUs."""

    def start(pod: Pod, container: str, words: list[str], **keys: object) -> Ended:
        config = write_config(tmp_path / "nvml.conf", "h100", {"count": pod.gpus} | keys)
        return forked(*words, env=stub_env(library.parent, config) | pod.env[container])

    return start


def rdzv_of(plan: Object) -> dict[str, str]:
    return dict(
        re.findall(r"--(nnodes|node-rank|rdzv-endpoint|rdzv-id)=(\S+)", "\n".join(plan["argv"]))
    )


def plan_of(run: Run, pod: Pod) -> Object:
    """Return the plan of `train`, or of `run` with `plan run`."""
    name, words = pod.train["name"], pod.train["args"]
    assert words[0] in ("train", "run")
    ended = run(pod, name, ["plan", *words[words[0] == "train" :]])
    assert (ended.code, ended.err) == (0, "")
    plan: Object = json.loads(ended.out)
    return plan


ENDPOINTS = {
    "several-nodes": "digits-train-0.digits-train:29400",
    "jobset": "digits-train-node-0-0.digits-train:29400",
    "trainjob": "digits-train-node-0-0.digits-train:29500",
}
RDZV_IDS = {"several-nodes": "digits-train", "jobset": "digits-train", "trainjob": "trainbox"}


def changed(folder: Path, name: str, *changes: tuple[str, str]) -> Path:
    """Copy all overlays, and change some lines of one as a user would."""
    shutil.copytree(DEPLOY, folder / "kubernetes")
    copy = shutil.copytree(folder / "kubernetes" / name, folder / "kubernetes" / "my-run")
    for old, new in changes:
        touched = [path for path in sorted(copy.iterdir()) if old in path.read_text()]
        assert touched, old
        for path in touched:
            path.write_text(path.read_text().replace(old, new))
    return copy


@pytest.mark.parametrize("name", ["one-node", *MULTI_NODE])
def test_a_changed_line_changes_all_that_depends_on_it(name: str, run: Run, tmp_path: Path) -> None:
    gpus, nodes = ("GPUS=", "NNODES=") if name != "trainjob" else ("com/gpu: ", "numNodes: ")
    changes = [("namePrefix: digits-", "namePrefix: my-"), (f"{gpus}1", f"{gpus}4")]
    changes += [(f"{nodes}2", f"{nodes}3")] * (name in MULTI_NODE)
    folder = changed(tmp_path, name, *changes)
    made = pods(folder)
    assert len(made) == (3 if name in MULTI_NODE else 1)
    for rank, pod in enumerate(made):
        assert pod.gpus == 4
        plan = plan_of(run, pod)
        assert (plan["strategy"], plan["nnodes"], plan["nproc_per_node"]) == ("ddp", len(made), 4)
        if name in MULTI_NODE:
            meeting = {"rdzv-endpoint": ENDPOINTS[name], "rdzv-id": RDZV_IDS[name]}
            own = {option: value.replace("digits", "my") for option, value in meeting.items()}
            assert rdzv_of(plan) == {"nnodes": "3", "node-rank": str(rank)} | own
            assert made[0].address == own["rdzv-endpoint"].partition(":")[0]
            assert ",await_name=1 " in " ".join(plan["argv"]), "a pod's name is known when it runs"
    if name != "trainjob":
        (health,) = made[0].spec["initContainers"]
        assert health["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert_closed(folder, made)


def test_a_training_without_gpus(run: Run, tmp_path: Path) -> None:
    (pod,) = pods(changed(tmp_path, "one-node", ("- GPUS=1", "- GPUS=0\n      - PROCESSES=2")))
    assert pod.gpus == 0
    plan = plan_of(run, pod)
    assert plan["reason"] == "2 CPU processes requested -> torchrun DDP over gloo, 2 processes"
    (health,) = pod.spec["initContainers"]
    assert run(pod, "health", health["args"]).code == 0
    assert run(pod, "train", pod.train["livenessProbe"]["exec"]["command"][1:]).code == 0


SCRIPT = ["run", "my_tasks/train.py", "--", "--epochs", "3"]


@pytest.mark.parametrize("name", ["several-nodes", "jobset", "trainjob"])
def test_a_script_on_several_nodes(
    name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The changes are taken from the page."""
    page = PAGE.read_text()
    if name == "trainjob":
        (line,) = re.findall(r"`args: (\[.*?\])`", page)
        assert yaml.safe_load(line) == SCRIPT
        folder = changed(tmp_path, name, ("numNodes: 2", f"numNodes: 2\n    args: {line}"))
    else:
        own = next(lines for _, lines in blocks() if SCRIPT[1] in str(lines))["patches"]
        kind = "Job"
        if name == "jobset":
            kind, (path,) = "JobSet", re.findall(r"`(/spec/replicatedJobs/\S+/args)`", page)
            own[0]["target"]["kind"], operation = kind, yaml.safe_load(own[0]["patch"])
            own[0]["patch"] = yaml.safe_dump([operation[0] | {"path": path}])
        folder = changed(tmp_path, name)
        file = folder / "kustomization.yaml"
        kustomization = yaml.safe_load(file.read_text())
        kustomization["patches"] = [*kustomization.get("patches", []), *own]
        file.write_text(yaml.safe_dump(kustomization))
    (tmp_path / "my_tasks").mkdir()
    (tmp_path / "my_tasks/train.py").touch()
    monkeypatch.chdir(tmp_path)
    for rank, pod in enumerate(pods(folder)):
        assert pod.train["args"] == SCRIPT
        plan = plan_of(run, pod)
        assert (plan["strategy"], plan["nnodes"], plan["nproc_per_node"]) == ("torchrun", 2, 1)
        assert plan["argv"][-3:] == SCRIPT[1:2] + SCRIPT[3:]
        meeting = {"rdzv-endpoint": ENDPOINTS[name], "rdzv-id": RDZV_IDS[name]}
        assert rdzv_of(plan) == {"nnodes": "2", "node-rank": str(rank)} | meeting


@pytest.mark.parametrize("name", ["one-node", "jobset"])
def test_health_0_opens_the_gate_and_the_liveness_probe(
    name: str, run: Run, tmp_path: Path
) -> None:
    folder = changed(tmp_path, name, ("- GPUS=1", "- GPUS=1\n      - HEALTH=0"))
    pod = pods(folder)[0]
    (health,) = pod.spec["initContainers"]
    for container, words in (
        ("health", health["args"]),
        (pod.train["name"], pod.train["livenessProbe"]["exec"]["command"][1:]),
    ):
        assert run(pod, container, words, **{"gpu0.ret": 15}).code == 0
        assert pod.env[container].pop("HEALTH") == "0"
        assert run(pod, container, words, **{"gpu0.ret": 15}).code == 1


def test_the_settings_of_a_run_are_immutable() -> None:
    for name in ("base", "one-node", "several-nodes", "sweep", "jobset"):
        assert one(DEPLOY / name, "ConfigMap")["immutable"] is True


# Network.


def assert_closed(folder: Path, made: list[Pod]) -> None:
    """The policy admits to the pods of this job only each other, at any port."""
    policy = one(folder, "NetworkPolicy")["spec"]
    labels = policy["podSelector"]["matchLabels"]
    assert policy == {
        "podSelector": {"matchLabels": labels},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": labels}}]}],
    }
    for pod in made:
        assert labels.items() <= pod.labels.items()
        assert labels.keys() & {JOB_NAME, JOBSET_NAME}, "pods of other jobs have the others as well"


@pytest.mark.parametrize("name", OVERLAYS)
def test_only_the_jobs_own_pods_reach_its_rendezvous(name: str) -> None:
    assert_closed(DEPLOY / name, pods(DEPLOY / name))


def test_the_service_gives_the_pods_their_dns_names() -> None:
    service = one(DEPLOY / "several-nodes", "Service")
    for pod in pods(DEPLOY / "several-nodes"):
        assert service["metadata"]["name"] == pod.spec["subdomain"]
        assert service["spec"]["selector"].items() <= pod.labels.items()
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    (port,) = service["spec"]["ports"]
    assert ENDPOINTS["several-nodes"].endswith(f":{port['port']}")


# Sweeps.


def test_pod_0_starts_the_sweep_and_the_others_join(tmp_path: Path) -> None:
    """Stand-ins for tini and trainbox print the arguments of each pod."""
    for name, text in {"tini": 'shift 2; exec "$@"', "trainbox": 'printf "%s\\n" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "name=wide").touch()  # ARGS must not be expanded to file names
    own = pods(DEPLOY / "sweep")[0].env["train"]
    arguments, script = f"{own['ARGS']} --set name=w*", "my_tasks/a.py --seeds 2 -- --seed {seed}"
    for given, first, second in (
        (arguments, f"sweep {arguments}", f"sweep {arguments} --worker"),
        (f"run {script}", f"sweep run {script}", f"sweep run --worker {script}"),
    ):
        for pod, expected in zip(pods(DEPLOY / "sweep"), (first, second), strict=True):
            env = clean_environment(**pod.env["train"])
            command = pod.train["command"] + pod.train["args"]
            variables = env | {"PATH": f"{tmp_path}:{env['PATH']}", "ARGS": given}
            out = subprocess.check_output(command, env=variables, cwd=tmp_path, text=True)
            assert out.splitlines() == expected.split()
    assert requested_sweep([*own["ARGS"].split(), "--worker"], own).total > 0


# The guide.


def blocks() -> list[tuple[str, Object]]:
    """Return (overlay, lines to change or add) of each block of the page that names its file."""
    found = re.findall(
        r"^```yaml\n# (\S+)/kustomization\.yaml\b[^\n]*\n(.*?)^```",
        PAGE.read_text(),
        re.MULTILINE | re.DOTALL,
    )
    return [(name, yaml.safe_load(text)) for name, text in found]


def test_the_changes_that_the_page_shows_have_their_effect(run: Run, tmp_path: Path) -> None:
    folders = []
    mnist, own, script, special, near, sweeping = blocks()
    mounted = yaml.safe_dump(own[1]).replace("gestures.py", "train.py")  # "mount it as above"
    script = (script[0], yaml.safe_load(mounted) | script[1])
    for number, (name, lines) in enumerate([mnist, own, script, special, near, sweeping]):
        folders.append(folder := changed(tmp_path / str(number), name))
        (folder / "gestures.py").touch()
        (folder / "train.py").touch()
        file = folder / "kustomization.yaml"
        file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | lines))
    *trainings, near, sweeping = folders
    (mnist,), (own,), (script,), (special,) = map(pods, trainings)
    # The settings of a training.
    assert mnist.address.startswith("mnist-train-")
    assert (
        mnist.env["train"].items()
        >= {"TASK": "mnist", "TRAINBOX_EPOCHS": "20", "SET": "dropout=0.3"}.items()
    )
    assert plan_of(run, mnist)["nproc_per_node"] == 4
    assert (own.env["train"]["TASK"], own.env["train"]["SET"]) == (
        "my_tasks/gestures.py:Gestures",
        "width=64",
    )
    # Resources, node, user and features of a cluster.
    limits = special.train["resources"]["limits"]
    assert limits == {
        "cpu": 32,
        "memory": "256Gi",
        "ephemeral-storage": "6Gi",
        "nvidia.com/gpu": 1,
    }
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}} in special.spec[
        "volumes"
    ]
    assert special.spec["nodeSelector"]
    assert (
        special.spec["securityContext"]["runAsUser"],
        special.spec["securityContext"]["runAsNonRoot"],
    ) == (4711, True)
    assert (special.spec["runtimeClassName"], special.spec["priorityClassName"]) == (
        "nvidia",
        "training",
    )
    (health,) = special.spec["initContainers"]
    assert health["resources"]["limits"]["ephemeral-storage"] == "6Gi"
    annotations = template_of(trainings[3])["metadata"]["annotations"]
    assert set(annotations.values()) == {"true", "false"}
    # A queue, near nodes and RDMA, on several nodes.
    job = job_of(near)
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert list(template_of(near)["metadata"]["annotations"].values()) == ["example.com/rack"]
    for pod in pods(near):
        assert pod.train["resources"]["limits"].items() >= {"rdma/hca": 1, "memory": "10Gi"}.items()
        assert pod.train["securityContext"]["capabilities"] == {
            "add": ["IPC_LOCK"],
            "drop": ["ALL"],
        }
    assert len(pods(near)) == 2
    # A script, which is beside the tasks.
    assert script.train["args"] == SCRIPT
    (made,) = (o for o in objects(trainings[2]) if "train.py" in o.get("data", {}))
    assert {"name": "tasks", "configMap": {"name": made["metadata"]["name"], "optional": True}} in (
        script.spec["volumes"]
    )
    # A sweep.
    sweep = pods(sweeping)
    assert [pod.gpus for pod in sweep] == [2] * 4
    words = sweep[0].env["train"]["ARGS"].split()
    assert requested_sweep(words, {"TASK": sweep[0].env["train"]["TASK"]}).total > 0


def test_the_folders_and_jobs_that_the_page_names_exist() -> None:
    page = PAGE.read_text()
    folders = set(re.findall(r"deploy/kubernetes/([\w-]+)", page)) - {"mnist"}
    table = set(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE))
    assert table == set(OVERLAYS)
    assert all(
        (DEPLOY / name / "kustomization.yaml").is_file()
        for name in folders | table | {"trainjob-runtime"}
    )
    assert "job/mnist-train" in page
