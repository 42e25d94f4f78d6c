"""Examples of clusters: what `ray up` and KubeRay's operator read, as far as files show it."""

from __future__ import annotations

import copy
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from seko_serve.fleet.config import read_config

yaml = pytest.importorskip("yaml", reason="needs seko-serve[ray]")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "serve" / "examples"
SCHEMA = json.loads((Path(__file__).parent / "rayservice.schema.json").read_text(encoding="utf-8"))


def resources() -> tuple[dict[str, Any], dict[str, Any]]:
    """The resources of the example for Kubernetes: the fleet's configuration, and the service."""
    config, service = yaml.safe_load_all((EXAMPLES / "kuberay.yaml").read_text(encoding="utf-8"))
    return config, service


def test_the_cluster_of_machines_is_one_that_ray_up_takes() -> None:
    """By Ray's own defaults and schema, which `ray up` applies before it does anything."""
    pytest.importorskip("ray", reason="needs seko-serve[ray]")
    from ray.autoscaler._private.util import prepare_config, validate_config

    cluster = yaml.safe_load((EXAMPLES / "ray-cluster.yaml").read_text(encoding="utf-8"))
    prepared = prepare_config(copy.deepcopy(cluster))
    validate_config(prepared)
    (nodes,) = prepared["available_node_types"].values()
    assert nodes["min_workers"] == len(cluster["provider"]["worker_ips"])
    with pytest.raises(jsonschema.ValidationError):
        validate_config({**prepared, "head_start_ray_command": []})
    assert [path for path in cluster["file_mounts"].values() if not (ROOT / path).exists()] == []
    config = read_config(ROOT / cluster["file_mounts"]["/opt/seko/fleet"] / "fleet.yaml")
    assert config.models[0].boxes == 1 + len(cluster["provider"]["worker_ips"])


def test_the_service_has_only_fields_that_its_definition_has() -> None:
    _, service = resources()
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(service, SCHEMA)
    for path in (
        ("serveConfig",),
        ("rayClusterConfig", "workerGroupSpec"),
        ("rayClusterConfig", "headGroupSpec", "gpus"),
    ):
        wrong = copy.deepcopy(service)
        table = wrong["spec"]
        for name in path[:-1]:
            table = table[name]
        table[path[-1]] = "1"
        with pytest.raises(jsonschema.ValidationError, match=path[-1]):
            jsonschema.validate(wrong, SCHEMA)


def groups(service: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods of the service: the head's and the workers'."""
    cluster = service["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_pods_and_configuration_are_ones_that_kubernetes_takes() -> None:
    library = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate, of the extra dev")
    config, service = resources()
    version = library.latest_version()
    library.validate(config, version, strict=True)
    for group in groups(service):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
        library.validate(pod, version, strict=True)
        pod["spec"] = {**pod["spec"], "hostnetwork": True}
        with pytest.raises(library.ValidationError, match="hostnetwork"):
            library.validate(pod, version, strict=True)


def test_one_server_is_a_deployment_that_kubernetes_takes() -> None:
    library = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate, of the extra dev")
    deployment, service = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text(encoding="utf-8"))
    for resource in (deployment, service):
        library.validate(resource, library.latest_version(), strict=True)
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    probes = [container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert {probe["path"] for probe in probes} == {"/health", "/ready"}
    assert {probe["port"] for probe in probes} == {port["name"] for port in container["ports"]}
    user = image_stages("Dockerfile.cuda")["serve"]["USER"].split(":")
    assert [str(pod["spec"]["securityContext"][name]) for name in ("runAsUser", "runAsGroup")] == user


def test_artifacts_are_unpacked_in_a_volume_that_the_image_s_user_writes(tmp_path: Path) -> None:
    """Who is there by number alone has no home, where the cache would be otherwise."""
    resource, service = resources()
    (tmp_path / "fleet.yaml").write_text(resource["data"]["fleet.yaml"])
    config = read_config(tmp_path / "fleet.yaml")
    assert any("://" in model.artifact for model in config.models)
    user, group = image_stages("Dockerfile.cuda")["fleet"]["USER"].split(":")
    for spec in (pods["template"]["spec"] for pods in groups(service)):
        empty = {volume["name"] for volume in spec["volumes"] if "emptyDir" in volume}
        (container,) = spec["containers"]
        written = [mount for mount in container["volumeMounts"] if mount["name"] in empty]
        assert any(config.cache.startswith(f"{mount['mountPath']}/") for mount in written)
        assert not any(mount.get("readOnly") for mount in written)
        context = spec["securityContext"]
        assert (context["runAsUser"], context["fsGroup"]) == (int(user), int(group))


def image_stages(name: str) -> dict[str, dict[str, str]]:
    """The last instruction of each kind, of each stage of a Dockerfile that has a name."""
    stages: dict[str, dict[str, str]] = {}
    stage = ""
    for line in (ROOT / "scripts/container" / name).read_text(encoding="utf-8").splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "FROM":
            stage = rest.partition(" AS ")[2]
        if kind.isupper():
            stages.setdefault(stage, {})[kind] = rest
    return stages


def test_the_image_s_stage_that_the_example_names_is_there_and_has_ray() -> None:
    text = (EXAMPLES / "kuberay.yaml").read_text(encoding="utf-8")
    ((file, stage),) = re.findall(r"-f (\S+) --target (\w+) -t IMAGE", text)
    stages = image_stages(Path(file).name)
    assert "USER" in stages[stage]
    copied = re.findall(r"--from=(\S+) /opt/seko", stages[stage]["COPY"])
    installed = stages[copied[0]]["RUN"]
    config, service = resources()
    extras = {"ray"} | ({"s3"} if "s3://" in config["data"]["fleet.yaml"] else set())
    assert set(re.findall(r"/build/serve\[([\w,]+)\]", installed)[0].split(",")) >= extras
    assert {container["image"] for group in groups(service)
            for container in group["template"]["spec"]["containers"]} == {"IMAGE"}  # fmt: skip


def test_the_service_mounts_the_configuration_that_it_names(tmp_path: Path) -> None:
    resource, service = resources()
    assert (resource["apiVersion"], resource["kind"]) == ("v1", "ConfigMap")
    ((name, text),) = resource["data"].items()
    (tmp_path / name).write_text(text)
    config = read_config(tmp_path / name)
    for group in groups(service):
        pod = group["template"]["spec"]
        assert pod["volumes"][0]["configMap"]["name"] == resource["metadata"]["name"]
        mount, _ = pod["containers"][0]["volumeMounts"]
        for application in yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]:
            assert application["args"]["config"] == f"{mount['mountPath']}/{name}"
    _, workers = groups(service)
    assert workers["replicas"] == sum(model.boxes for model in config.models)


def test_the_services_applications_are_made_of_its_configuration(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs seko-serve[ray]")
    from ray.serve.schema import ServeDeploySchema

    from seko_serve.fleet import deployments

    resource, service = resources()
    (tmp_path / "fleet.yaml").write_text(resource["data"]["fleet.yaml"])
    serving = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    bindings = {}
    for application in serving.applications:
        module, _, builder = str(application.import_path).partition(":")
        assert module == deployments.__name__
        arguments = {**application.args, "config": str(tmp_path / "fleet.yaml")}
        bindings[builder] = getattr(deployments, builder)(arguments)._bound_deployment
    assert (bindings["boxes"].name, bindings["boxes"].num_replicas) == (deployments.BOX, 4)
    assert bindings["gateways"].name == "gateway"
    assert serving.http_options.port == read_config(tmp_path / "fleet.yaml").port
    for builder, arguments, sentence in (
        (deployments.boxes, {"config": "x"}, "args has config, expected config and artifact"),
        (deployments.boxes, {"config": str(tmp_path / "fleet.yaml"), "artifact": "y"}, "artifact is 'y'"),
        (deployments.gateways, {}, "args has nothing, expected config"),
    ):
        with pytest.raises(ValueError, match=sentence):
            builder(arguments)


def test_boxes_whose_number_changes_are_started_by_the_scaler(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs seko-serve[ray]")
    from seko_serve.fleet import deployments

    file = tmp_path / "fleet.yaml"
    file.write_text("models: [{artifact: a, max_boxes: 2}]\nsnapshots: s\n")
    with pytest.raises(ValueError, match="a has max_boxes: the application of scaler starts its boxes"):
        deployments.boxes({"config": str(file), "artifact": "a"})
    bound = deployments.scaler({"config": str(file)})._bound_deployment
    assert (bound.name, bound.num_replicas) == ("scaler", 1)


def test_the_service_runs_the_ray_that_is_tested() -> None:
    _, service = resources()
    version = service["spec"]["rayClusterConfig"]["rayVersion"]
    pins = (ROOT / "scripts" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"ray=={version}" in pins
    extras = tomllib.loads((ROOT / "serve" / "pyproject.toml").read_text(encoding="utf-8"))
    (ray,) = (line for line in extras["project"]["optional-dependencies"]["ray"] if line.startswith("ray"))
    assert ray == f"ray[serve]>={version.rpartition('.')[0]},<2.61"
