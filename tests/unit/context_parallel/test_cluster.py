import pytest
import yaml

from megatron_dsv.context_parallel import cluster
from megatron_dsv.presets import path


@pytest.mark.parametrize("name", cluster.names())
def test_packaged_clusters_load(name):
    loaded = cluster.load(name)
    assert loaded == cluster.load(f"cluster/{name}")
    assert loaded.name == name
    assert loaded.network.gbps < loaded.node_link.gbps


def test_fewer_or_more_gpus_of_the_same_machines():
    h200 = cluster.load("h200")
    assert h200.gpus == 128
    assert (h200.with_gpus(4096).nodes, h200.with_gpus(4096).gpus_per_node) == (512, 8)
    assert (h200.with_gpus(4).nodes, h200.with_gpus(4).gpus_per_node) == (1, 4)
    with pytest.raises(ValueError, match="at most one node, 8, or a multiple of it, got 12"):
        h200.with_gpus(12)


@pytest.mark.parametrize(("edit", "message"), [
    (lambda data: data.update(speed=1), "cluster mine.yaml: unknown key 'speed'; keys: name, gpu, kernel-speed"),
    (lambda data: data.pop("nodes"), "cluster mine.yaml: key 'nodes' is missing"),
    (lambda data: data.update({"nodes": 1.5}), "cluster mine.yaml: nodes must be a whole number, got 1.5"),
    (lambda data: data.update({"nodes": 0}), "cluster mine.yaml: nodes must be above 0, got 0"),
    (lambda data: data.update({"nodes": True}), "nodes must be a whole number, got True"),
    (lambda data: data.update({"overlap": 1.2}), r"overlap must be in \[0, 1\], got 1.2"),
    (lambda data: data.update({"memory-gib": float("nan")}), "memory-gib must be a number, got nan"),
    (lambda data: data.update({"gpu": 5}), "gpu must be text, got 5"),
    (lambda data: data.update({"network": 5}), "network must be a mapping with gbps, latency-us and peer-us, got 5"),
    (lambda data: data["network"].pop("gbps"), "cluster mine.yaml: network: key 'gbps' is missing"),
    (lambda data: data["network"].update({"latency-us": -1}), "network: latency-us must be at least 0, got -1"),
    (lambda data: data.update({"memory-gib": 1e308}), "memory-gib must be between 1e-06 and 1e.09, got 1e.308; its"),
    (lambda data: data["network"].update({"gbps": 1e-300}), "network: gbps must be between 1e-06 and 1e.09, got 1e-3"),
])
def test_a_bad_cluster_says_what_is_wrong_in_one_line(tmp_path, edit, message):
    data = yaml.safe_load(path("cluster/h200").read_text())
    edit(data)
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(ValueError, match=message) as caught:
        cluster.load(str(file))
    assert "\n" not in str(caught.value)


def test_what_is_no_cluster(tmp_path):
    with pytest.raises(ValueError, match="no cluster 'b200'; clusters: h100x4, h200, h200x2, h800; a file needs"):
        cluster.load("b200")
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        cluster.load(str(tmp_path / "none.yaml"))
    file = tmp_path / "list.yaml"
    file.write_text("[1, 2]")
    with pytest.raises(ValueError, match="must be a mapping of keys to values, got list"):
        cluster.load(str(file))
    file.write_bytes(b"\xff\xfe\x81")
    with pytest.raises(ValueError, match=r"list\.yaml: cannot be read: it is not text in UTF-8"):
        cluster.load(str(file))
