"""The server of `bigscl view`: what it answers, whom, and what it refuses."""

import base64
import csv
import functools
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from bigscl.data import answers
from bigscl.data.answers import FILE, read_answers
from bigscl.data.build_index import scan
from bigscl.data.crops import RandomCrop
from bigscl.data.index import load_index
from bigscl.data.read_samples import read_encoded
from bigscl.store import HeatmapStore, StoreError
from bigscl.tools.shared.open_store import DataFlags, StorageFlags
from bigscl.tools.viewer import open_run, pictures, sample_lists, server
from bigscl.tools.viewer.open_run import OpenRun, Places
from bigscl.tools.viewer.server import FILES, STATIC
from tests.builders import learn, make_store, write_tar
from tests.test_tools.conftest import add_config, bigscl
from tests.test_tools.view_site import TOKEN, serving

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, runs):
    """Runs of one's own, since indexes and answers are written into them."""
    folder = tmp_path_factory.mktemp("served")
    for name in ("dense", "weak", "topk"):
        shutil.copytree(runs / name, folder / name)
    lines = [{"kind": "train", "step": step, "epoch": 1, "loss": 1 / step} for step in (10, 20, 30)]
    (folder / "dense" / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def site(folder):
    with serving(folder / "dense", folder / "weak", folder / "topk") as site:
        yield site


# Who may ask


@pytest.mark.parametrize(
    "host",
    [None, "", "evil.example", "evil.example:80", "127.0.0.1.evil.example", "[", "localhost@evil.example"],
)
@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/image?row=0", "/app.js"])
def test_other_hosts_are_refused(site, host, path):
    got = site.ask(path, Host=host)
    assert got.status in (400, 421)
    assert b"train_" not in got.body


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_names_of_this_machine_are_known(site, host):
    assert site.ask("/api/runs", Host=f"{host}:{site.port}").status == 200


def test_two_hosts_in_one_request_are_refused(site):
    with socket.create_connection(("127.0.0.1", site.port), timeout=10) as connection:
        own = f"127.0.0.1:{site.port}"
        connection.sendall(f"GET /api/runs HTTP/1.1\r\nHost: {own}\r\nHost: evil.example\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 421")


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},  # another port of this machine
    ],
)
def test_other_origins_are_refused(site, headers):
    assert site.ask("/api/runs", **headers).status == 403
    assert site.ask("/api/thumbnail?row=0", **headers).status == 403
    assert site.send("/api/skip", {"run": 0, "row": 0, "class": 0}, **headers).status == 403


def test_link_from_elsewhere_opens_the_page_and_nothing_else(site):
    headers = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert site.ask("/", **headers).status == 200
    assert site.ask("/api/runs", **headers).status == 403


def test_writes_need_the_token_in_a_header_and_json(site):
    value = {"run": 0, "row": 0, "class": 0}
    cookie = f"bigscl-view-{site.port}={site.server.cookie}"
    assert site.send("/api/skip", value).status == 200
    assert site.send("/api/skip", value, X_Bigscl_Token=None).status == 401
    assert site.send("/api/skip", value, X_Bigscl_Token="wrong").status == 401
    assert site.send("/api/skip", value, X_Bigscl_Token=None, Cookie=cookie).status == 401
    assert site.send("/api/skip", value, X_Bigscl_Token=site.server.cookie).status == 401
    assert site.send(f"/api/skip?token={TOKEN}", value, X_Bigscl_Token=None).status == 401
    assert site.send("/api/skip", value, Content_Type="text/plain").status == 415
    assert site.send("/api/skip", value, Origin=None, Sec_Fetch_Site="same-origin").status == 403
    assert site.send("/api/skip", {**value, "again": True}).status == 200


def test_token_in_the_address_becomes_a_cookie_that_only_reads(site):
    got = site.ask(f"/?token={TOKEN}&page=run&key=%0d%0aX:+y")
    assert got.status == 303
    assert got.headers["location"] == f"/?page=run&key=%0D%0AX%3A+y#{TOKEN}"
    assert "HttpOnly; SameSite=Strict" in got.headers["set-cookie"]
    assert TOKEN not in got.headers["set-cookie"]
    assert site.ask("/?token=wrong").status == 200


def test_beyond_this_machine_everything_needs_the_token(folder):
    with serving(folder / "dense", host="0.0.0.0") as site:
        for path in ("/", "/app.js", "/api/runs", "/api/thumbnail?row=0", "/?token=wrong"):
            assert site.ask(path).status == 401, path
        for host in ("evil.example", f"evil.example:{site.port}"):
            assert site.ask("/", Host=host, X_Bigscl_Token=TOKEN).status == 421
        cookie = site.ask(f"/?token={TOKEN}").headers["set-cookie"].partition(";")[0]
        for path in ("/", "/app.js", "/api/runs", "/api/thumbnail?row=0"):
            assert site.ask(path, Cookie=cookie).status == 200
            assert site.ask(path, X_Bigscl_Token=TOKEN).status == 200
            assert site.ask(path, Cookie="bigscl=1; ;;=").status == 401
        assert site.server.address.endswith(f"/?token={TOKEN}")


def test_every_answer_forbids_foreign_code_and_frames(site):
    for path in ("/", "/app.js", "/api/runs", "/api/nothing", "/api/thumbnail?row=0", "/api/sample?row=x"):
        headers = site.ask(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers


# What is asked


@pytest.mark.parametrize(
    "path",
    [
        *("/../server.py", "/..%2fserver.py", "/static/app.js", "//etc/passwd", "/app.js/../../server.py"),
        *("/%2e%2e/server.py", "/api/../server.py", "/index.html", "/server.py", "/app.js%00"),
        "http://evil.example/app.js/x",
    ],
)
def test_no_path_reaches_the_file_system(site, path):
    got = site.ask(path)
    assert got.status in (400, 404)
    assert b"root:" not in got.body
    assert b"ThreadingHTTPServer" not in got.body


def test_files_of_the_page_are_those_of_the_table(site):
    assert {name for name, _ in FILES.values()} == {file.name for file in STATIC.iterdir()}
    for path, (name, kind) in FILES.items():
        got = site.ask(path)
        assert (got.status, got.headers["content-type"], got.body) == (
            200,
            kind,
            (STATIC / name).read_bytes(),
        )


def test_page_asks_nobody_else():
    """No address of another server in any file, and no text from the server becomes markup."""
    for file in STATIC.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text), (
            file
        )


@pytest.mark.parametrize(
    "query",
    [
        # A digit, but not of ours; past the end of the last shard.
        *("row=%D9%A3", "row=31", "row=-1", "row=999999", "row=x", "row=1e3", "row=" + "9" * 400),
        *("row=0&run=3", "row=0&run=-1", "row=0&at=99999", "", "&".join(f"a{n}=1" for n in range(200))),
        "row=" + "9" * 5000,
    ],
)
def test_wrong_parameters_are_named(site, query):
    for path in ("sample", "history", "image", "thumbnail"):
        if "at=" in query and path != "sample":
            continue
        got = site.ask(f"/api/{path}?{query}")
        assert got.status in (400, 503), got.body
        assert got.json()["error"]


@pytest.mark.parametrize(
    "query",
    [
        *("sort=x", "class=99", "low=2", "low=nan", "high=-1", "annotated=maybe", "against=2&sort=x"),
        *("count=0", "count=100000", "offset=-1", "sort=against", "key=" + "k" * 600),
    ],
)
def test_wrong_queries_of_the_grid_are_named(site, query):
    got = site.ask(f"/api/samples?{query}")
    assert got.status == 400
    assert got.json()["error"].partition(":")[0] in (
        "sort",
        *query.replace("=", " ").replace("&", " ").split(),
    )


def test_broken_requests_do_not_stop_the_server(site):
    for data in (
        b"\0\0\0\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /api/skip HTTP/1.1\r\n",
        b"x" * 70_000,
    ):
        with socket.create_connection(("127.0.0.1", site.port), timeout=10) as connection:
            connection.sendall(data)
    big = site.send("/api/skip", "x" * 100_000)
    assert big.status == 413
    assert (
        site.ask("/api/skip", "POST", b"{", Content_Type="application/json", X_Bigscl_Token=TOKEN).status
        == 400
    )
    deep = b"[" * 60_000
    assert (
        site.ask("/api/skip", "POST", deep, Content_Type="application/json", X_Bigscl_Token=TOKEN).status
        == 400
    )
    chunked = site.send("/api/skip", {}, Transfer_Encoding="chunked")
    assert chunked.status == 411
    assert site.ask("/", "DELETE").status == 501
    assert site.ask("/api/runs").status == 200


# Answers


def test_grid_has_pairs_with_their_heat(site):
    found = site.ask("/api/samples?count=5&offset=3").json()
    assert found["total"] == 30
    run = site.runs[0]
    for one in found["items"]:
        rows = run.store.read_without_initial_value([one["row"]])
        assert one["score"] == rows.scores[0, one["class"]]
        heat = np.frombuffer(base64.b64decode(one["heat"]), np.uint8).reshape(12, 12)
        np.testing.assert_allclose(heat / 255, rows.heatmaps[0, one["class"]], atol=0.003)
        assert one["key"] == run.data.index.key(one["row"])


def test_pages_join_to_the_whole_list(site):
    pages = [
        site.ask(f"/api/samples?sort=heat&count=7&offset={start}").json()["items"]
        for start in range(0, 35, 7)
    ]
    rows = [one["row"] for page in pages for one in page]
    assert sorted(rows) == site.runs[0].data.index.ids().tolist()
    assert pages[-1] == [] or len(pages[-1]) == 2


def test_tiles_have_the_given_labels(site):
    index = site.runs[0].data.index
    for item in site.ask("/api/samples?count=30").json()["items"]:
        given = np.flatnonzero(index.labels_of(np.array([item["row"]]))[0] == 1)
        assert item["given"] == given[:4].tolist()
        assert item["more_given"] == max(0, len(given) - 4)


@pytest.mark.parametrize(
    "query",
    ["sort=row", "class=3&sort=score&annotated=no", "sort=against&against=1", "key=00002&reverse=yes"],
)
def test_table_has_the_whole_list(site, monkeypatch, query):
    monkeypatch.setattr(sample_lists, "PART", 7)
    got = site.ask(f"/api/samples.csv?{query}")
    assert got.headers["content-type"].startswith("text/csv")
    assert "attachment" in got.headers["content-disposition"]
    rows = list(csv.DictReader(io.StringIO(got.body.decode())))
    items = site.ask(f"/api/samples?{query}&count=200").json()["items"]
    index = site.runs[0].data.index
    assert len(rows) == len(items) > 0
    for row, item in zip(rows, items, strict=True):
        assert (int(row["id"]), row["key"], int(row["class"])) == (item["row"], item["key"], item["class"])
        assert row["name"] == index.class_names[item["class"]]
        assert float(row["score"]) == pytest.approx(item["score"], abs=1e-4)
        assert (row["annotated"], row["expected"]) == (str(item["annotated"]), str(item["expected"]))
        assert row["given"] == "; ".join(index.class_names[number] for number in item["given"])


def test_table_is_made_while_it_is_sent(site, monkeypatch):
    """The parts of it are made one after the other, and a client that goes away ends it."""
    monkeypatch.setattr(sample_lists, "PART", 1)
    made = []

    def rows(self, run, pairs, *others, of=sample_lists.SampleLists._rows):
        made.append(len(pairs))
        return of(self, run, pairs, *others)

    monkeypatch.setattr(sample_lists.SampleLists, "_rows", rows)
    reply = site.api.answer("/api/samples.csv", "sort=row")
    assert made == []
    parts = [next(reply.parts) for _ in range(3)]
    assert made == [1, 1]
    assert all(len(part.splitlines()) == 1 for part in parts)
    assert len(site.ask("/api/samples.csv?sort=row").body.splitlines()) == 31


def test_sample_has_classes_heatmaps_boxes_and_views(site):
    run = site.runs[2]  # top 4
    for row in (0, 9, 29):
        found = site.ask(f"/api/sample?run=2&row={row}").json()
        rows = run.store.read_without_initial_value([row])
        assert found["maps"]["classes"] == rows.classes[0].tolist()
        heat = np.frombuffer(base64.b64decode(found["maps"]["heat"]), np.uint8).reshape(4, 12, 12)
        np.testing.assert_allclose(heat / 255, rows.heatmaps[0], atol=0.003)
        assert [one["score"] for one in found["classes"]] == sorted(rows.scores[0].tolist(), reverse=True)
        present = {one["class"] for one in found["classes"] if one["present"]}
        assert {box[0] for box in found["boxes"]} == present
        assert found["size"] == list(Image.open(io.BytesIO(read_encoded(run.data.index, row))).size)


def test_views_are_those_of_the_training(folder):
    run = folder / "viewed"
    shutil.copytree(folder / "dense", run)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(
        f"run: {run}\nseed: 7\n{config}  size: 64\n  crop: {{scale: [0.2, 0.9]}}\n"
        "model: {backbone: bigscl.models.smallnet:small_resnet}\nselection: {K: 2.0}\n"
        "schedule: {warmup: {epochs: 1, learning_rate: 0.001}, main: {epochs: 1, learning_rate: 0.001}}\n"
    )
    with serving(run) as site:
        found = site.ask("/api/sample?row=5").json()
    crop = RandomCrop(scale=(0.2, 0.9))
    width, height = found["size"]
    assert [view["epoch"] for view in found["views"]] == [2, 1, 0]
    for view in found["views"]:
        wanted = crop.view(seed=7, epoch=view["epoch"], sample_id=5, width=width, height=height)
        assert view["box"] == pytest.approx(wanted.fractions()[:4])
        assert view["flip"] == wanted.flip


def test_older_snapshot_of_a_sample_is_shown(site):
    snapshots = site.ask("/api/sample?row=3").json()["snapshots"]
    assert len(snapshots) > 1
    old = site.ask(f"/api/sample?row=3&at={snapshots[0]}").json()
    assert old["snapshot"] == snapshots[0]
    store = site.runs[0].at(snapshots[0])
    assert old["classes"][0]["score"] == float(store.read([3]).scores.max())


def test_history_of_tracked_samples_has_each_epoch(site):
    run = site.runs[0]
    history_samples = run.store.spec.history_samples[1]
    found = site.ask(f"/api/history?row={history_samples}").json()["epochs"]
    assert list(found) == ["0", "1", "2"]
    past = run.store.history(history_samples)
    for epoch, one in found.items():
        rows = past[int(epoch)]
        assert all(score == rows.scores[0, int(number)] for number, score in one["scores"].items())
        heat = np.frombuffer(base64.b64decode(one["maps"]["heat"]), np.uint8)
        np.testing.assert_allclose(heat / 255, rows.heatmaps[0].ravel(), atol=0.003)
    other = next(row for row in range(30) if row not in run.store.spec.history_samples)
    assert site.ask(f"/api/history?row={other}").json() == {"epochs": {}}


def test_images_are_the_files_of_the_shards_or_small_ones(site):
    whole = site.ask("/api/image?row=4")
    assert whole.headers["content-type"] == "image/png"
    assert whole.body == bytes(read_encoded(site.runs[0].data.index, 4))
    small = site.ask("/api/thumbnail?row=4&side=40")
    sizes = [Image.open(io.BytesIO(got.body)).size for got in (whole, small)]
    assert max(sizes[1]) <= 40 < max(sizes[0])
    assert "immutable" in small.headers["cache-control"]
    assert site.ask("/api/runs").headers["cache-control"] == "no-store"


def test_runs_say_which_have_the_same_samples(site):
    runs = site.ask("/api/runs").json()
    assert [run["same_samples"] for run in runs] == [[1, 2], [0, 2], [0, 1]]
    apart = site.ask("/api/samples?sort=against&against=1&count=3").json()
    assert apart["total"] == 30
    assert apart["items"][0]["change"] >= apart["items"][1]["change"] > 0


def test_comparison_that_takes_long_does_not_hold_the_page_up(folder, monkeypatch):
    monkeypatch.setattr(open_run, "SECONDS_TO_COMPARE", 0.01)
    going_on, compare = threading.Event(), open_run.disagreement

    def slow(*arguments):
        assert going_on.wait(60)
        return compare(*arguments)

    monkeypatch.setattr(open_run, "disagreement", slow)
    with serving(folder / "weak", folder / "topk") as site:
        path = "/api/samples?sort=against&against=1"
        assert site.ask(path).json()["pending"]
        assert site.ask(path).json()["pending"]
        assert site.ask("/api/samples").json()["total"] == 30
        going_on.set()
        deadline = time.monotonic() + 60
        while site.ask(path).json()["total"] == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert site.ask(path).json()["total"] == 30


def test_classes_have_counts_and_partners(site):
    found = site.ask("/api/classes").json()["classes"]
    index = site.runs[0].index
    assert found["mined"] == index.classes.mined.tolist()
    number = int(index.classes.together[0][0])
    partners = site.ask(f"/api/class?class={number}").json()["found_with"]
    assert [one[1] for one in partners] == sorted((one[1] for one in partners), reverse=True)
    assert sum(one[1] for one in partners) == sum(n for a, _, n in index.classes.together if a == number)


def test_curves_grow_with_the_file(site, folder):
    file = folder / "dense" / "metrics.jsonl"
    first = site.ask("/api/curves").json()
    assert [line["step"] for line in first["lines"]] == [10, 20, 30]
    with file.open("a") as out:
        out.write('{"kind": "val", "step": 40, "map": 0.5, "note": "x"}\n[]\n{"kind": "train", "st')
    more = site.ask(f"/api/curves?after={first['next']}").json()
    assert more["lines"] == [{"kind": "val", "step": 40, "map": 0.5}]
    with file.open("a") as out:
        out.write('ep": 50, "loss": NaN}\n')
    last = site.ask(f"/api/curves?after={more['next']}").json()
    assert last["lines"] == [{"kind": "train", "step": 50, "loss": None}]
    file.write_text('{"kind": "train", "step": 1}\n')
    assert site.ask(f"/api/curves?after={last['next']}").json()["start"] == 0


def test_store_page_has_snapshots_lease_and_disk(site):
    found = site.ask("/api/store").json()
    assert found["lease"] is None
    assert found["free"] > 0
    assert [one["id"] for one in found["snapshots"]] == [one.id for one in site.runs[0].store.snapshots()]
    assert sum(found["bytes"].values()) > 10_000


# Questions


def answers_of(run, items, yes, who="ann"):
    own = [{"row": item["row"], "class": item["class"], "yes": yes} for item in items]
    return {"run": run, "who": who, "answers": own}


def test_answers_go_into_the_file_and_out_of_the_queue(site, folder):
    first = site.ask("/api/questions?count=3").json()
    one, two = first["items"][:2]
    assert one["present"] is None
    assert site.send("/api/answers", answers_of(0, [one], True)).status == 200
    assert site.send("/api/skip", {"run": 0, "row": two["row"], "class": two["class"]}).status == 200
    after = site.ask("/api/questions?count=50").json()
    left = {(item["row"], item["class"]) for item in after["items"]}
    assert (one["row"], one["class"]) not in left
    assert (two["row"], two["class"]) not in left
    assert (after["yes"], after["no"], after["skipped"]) == (1, 0, 1)
    (kept,) = read_answers(folder / "dense" / FILE).standing.values()
    index = site.runs[0].data.index
    assert (kept.key, kept.class_name) == (index.key(one["row"]), index.class_names[one["class"]])
    assert (kept.yes, kept.who, kept.snapshot) == (True, "ann", str(site.runs[0].index.snapshot))
    # Undone: it is asked again.
    site.send("/api/answers", answers_of(0, [one], None))
    site.send("/api/skip", {"run": 0, "row": two["row"], "class": two["class"], "again": True})
    again = site.ask("/api/questions?count=50").json()
    assert {(item["row"], item["class"]) for item in again["items"]} >= {(one["row"], one["class"])}
    assert (again["yes"], again["skipped"]) == (0, 0)


def test_answers_of_a_bulk_are_one_write_and_shown_in_the_list(site, folder, monkeypatch):
    file = folder / "topk" / FILE
    before = file.read_bytes() if file.exists() else b""
    items = site.ask("/api/samples?run=2&count=9").json()["items"]
    assert [item["answer"] for item in items] == [None] * 9
    writes = []

    def write_all(descriptor, data, write=answers._write_all):
        writes.append(data)
        write(descriptor, data)

    monkeypatch.setattr(answers, "_write_all", write_all)
    assert site.send("/api/answers", answers_of(2, items[:6], False, "bob")).status == 200
    assert site.send("/api/answers", answers_of(2, items[:4], True)).status == 200
    assert [len(data.splitlines()) for data in writes] == [6, 4]
    assert file.read_bytes() == before + b"".join(writes)
    shown = site.ask("/api/samples?run=2&count=9").json()["items"]
    assert [(item["answer"], item["who"]) for item in shown] == (
        [(True, "ann")] * 4 + [(False, "bob")] * 2 + [(None, None)] * 3
    )
    # Undone: the answers of the other person stand again.
    assert site.send("/api/answers", answers_of(2, items[:4], None)).status == 200
    shown = site.ask("/api/samples?run=2&count=9").json()["items"]
    assert [(item["answer"], item["who"]) for item in shown] == [(False, "bob")] * 6 + [(None, None)] * 3
    file.write_bytes(before)


def test_answers_of_several_people_at_once_are_all_kept(site, folder):
    items = site.ask("/api/questions?run=1&count=40").json()["items"]

    def answer(who):
        for one in items[who::4]:
            value = answers_of(1, [one], who % 2 == 0, f"p{who}")
            assert site.send("/api/answers", value).status == 200

    threads = [threading.Thread(target=answer, args=(who,)) for who in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(read_answers(folder / "weak" / FILE).standing) == len(items)


GOOD = {"row": 0, "class": 0, "yes": True}


@pytest.mark.parametrize(
    "value",
    [
        [],
        "x",
        None,
        {},
        {"run": 0},
        {"run": 0, "who": "me"},
        {"run": 0, "who": "me", "answers": {}},
        {"run": 0, "who": "me", "answers": []},
        {"run": 0, "who": "me", "answers": [None]},
        {"run": 0, "who": "me", "answers": [GOOD] * 201},
        {"run": 0, "who": "me", "answers": [GOOD, {**GOOD, "row": "0"}]},
        {"run": 0, "who": "me", "answers": [GOOD, {**GOOD, "class": True}]},
        {"run": 9, "who": "me", "answers": [GOOD]},
        {"run": 0, "who": "me", "answers": [GOOD, {**GOOD, "row": -1}]},
        {"run": 0, "who": "me", "answers": [GOOD, {**GOOD, "class": 10**30}]},
        {"run": 0, "who": "me", "answers": [GOOD, {**GOOD, "yes": "yes"}]},
        {"run": 0, "who": "me", "answers": [GOOD, {**GOOD, "yes": 1}]},
        {"run": 0, "who": "me", "answers": [GOOD, {"row": 0, "class": 0}]},
        {"run": 0, "answers": [GOOD]},
        {"run": 0, "who": "", "answers": [GOOD]},
        {"run": 0, "who": "w" * 1000, "answers": [GOOD]},
    ],
)
def test_wrong_answers_are_refused_and_not_kept(site, folder, value):
    file = folder / "dense" / FILE
    before = file.read_bytes() if file.exists() else b""
    got = site.send("/api/answers", value)
    assert got.status == 400
    assert got.json()["error"]
    assert (file.read_bytes() if file.exists() else b"") == before


# Runs that are not as they should be


def hostile_run(folder, index):
    """A run whose class names and keys are markup, and whose last image is a page."""
    shards = folder / "shards"
    shards.mkdir(parents=True)
    for number in range(2):
        with tarfile.open(shards / f"train-{number:06d}.tar", "w") as tar:
            for place in range(3):
                image = io.BytesIO()
                Image.new("RGB", (40, 30), (90 * place, 60, 200)).save(image, "JPEG")
                content = (
                    image.getvalue() if (number, place) != (1, 2) else b"<html><script>alert(1)</script>"
                )
                key = f"{HOSTILE}-{number}-{place}".replace("/", "")
                for extension, data in (("jpg", content), ("cls", str(place).encode())):
                    info = tarfile.TarInfo(f"{key}.{extension}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    names = [HOSTILE, "</script><script>alert(2)</script>", "\u202eesrever\x1b[31m"]
    urls = sorted(map(str, shards.glob("*.tar")))
    found, problems = scan(urls, class_names=names)
    assert not problems
    found.save(shards / "bigscl-index-train.npz")
    made = load_index(urls)
    annotations = made.annotations()
    run = folder / "run"
    HeatmapStore.create(run / "store", annotations, heatmap_size=4)
    with HeatmapStore.open(run / "store", annotations=annotations, mode="w", run="x") as store:
        for shard in range(2):
            rows = store.load_shard(shard)
            rows.scores[:], rows["last_epoch"][:] = 0.5, 0
            store.save_shard(shard, rows)
        store.commit(epoch=0, step=1, attributes={})
    add_config(run, made)
    return run


def test_hostile_names_travel_as_text_and_hostile_images_not_at_all(tmp_path, index):
    with serving(hostile_run(tmp_path, index)) as site:
        (run,) = site.ask("/api/runs").json()
        assert run["classes"][0] == HOSTILE
        assert "\u202e" not in run["classes"][2]
        for path in ("/api/runs", "/api/samples", "/api/sample?row=0"):
            assert site.ask(path).headers["content-type"] == "application/json"
        whole, small = site.ask("/api/image?row=0"), site.ask("/api/thumbnail?row=0&side=32")
        assert whole.headers["content-type"] == "image/jpeg"
        assert small.body == whole.body  # a small JPEG is sent as it is
        for path in ("/api/image?row=5", "/api/thumbnail?row=5"):
            got = site.ask(path)
            assert got.status == 503
            assert b"alert(1)" not in got.body
        sample = site.ask("/api/sample?row=5").json()
        assert "cannot be decoded" in sample["unreadable"]


def test_page_is_served_while_its_index_is_being_built(run):
    with serving(run, follow=False) as site:
        assert site.ask("/api/samples").json()["total"] == 0
        assert "is being built" in site.ask("/api/samples.csv").json()["error"]
        assert site.ask("/api/classes").json()["classes"] is None
        assert site.ask("/api/questions").json()["items"] == []
        assert site.ask("/api/sample?row=0").json()["classes"][0]["expected"] is None
        site.runs[0].follow()
        assert site.ask("/api/samples").json()["total"] == 30


def test_training_that_drops_the_shown_snapshot_is_followed(run, index):
    with serving(run) as site:
        random = np.random.default_rng(0)
        for epoch in (3, 4, 5):
            with HeatmapStore.open(
                run / "store", annotations=index.annotations(), mode="w", run="x"
            ) as store:
                learn(store, index, epoch, 1.0, random)
                store.drop_snapshots(keep=[])
        found = site.ask("/api/sample?row=2")
        assert found.status == 200, found.body
        assert found.json()["snapshot"] >= site.runs[0].index.snapshot
        assert site.ask("/api/samples").status == 200


def test_requests_at_once_follow_a_training_that_dropped_the_shown_snapshot(run, index, monkeypatch):
    peek = HeatmapStore.peek

    def peek_beside_another_request(store, ids):
        try:
            return peek(store, ids)
        except StoreError:
            site.runs[0].reopen()
            raise

    monkeypatch.setattr(HeatmapStore, "peek", peek_beside_another_request)
    with serving(run) as site:
        with HeatmapStore.open(run / "store", annotations=index.annotations(), mode="w", run="x") as store:
            learn(store, index, 3, 1.0, np.random.default_rng(0))
            store.drop_snapshots(keep=[])
        found = site.ask("/api/sample?row=2")
        assert found.status == 200, found.body
        assert found.json()["snapshot"] == store.snapshot.id


def test_damaged_chunk_is_an_error_on_the_page_not_the_end_of_it(run):
    with serving(run) as site:
        for chunk in (run / "store").glob("arrays-*/scores/c.*"):
            chunk.unlink()
        got = site.ask("/api/samples")
        assert got.status == 503
        assert "bigscl verify" in got.json()["error"]
        assert site.ask("/api/classes").status == 200


def test_store_in_a_bucket_is_shown(index, s3_options, tmp_path):
    url = "s3://bucket/viewed"
    make_store(url, index, options=s3_options)
    flags = StorageFlags(endpoint=s3_options.endpoint, region=s3_options.region)
    source = DataFlags(shards=[index.urls[0].replace("000000", "*")])
    run = OpenRun(url, Places(source=source, storage=flags, cache=tmp_path / "cache"))
    run.update(now=True)
    rows = run.store.peek([3, 17])
    assert np.array_equal(rows.scores, run.store.read([3, 17]).scores)


def test_command_prints_its_address_and_ends_when_told(run):
    command = [sys.executable, "-m", "bigscl", "view", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        address = process.stdout.readline()
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/\?token=[\w-]{32}\n", address)[1])
        deadline = time.monotonic() + 60
        while not list((run / "view").glob("snapshot-*/index.json")) and time.monotonic() < deadline:
            time.sleep(0.1)
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        # Ctrl-C is the same, unless the tests run in the background, where it is ignored.
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


def test_taken_port_is_named(run, site):
    answer = bigscl("view", run, "--port", site.port)
    assert answer.code == 2
    assert f"--port {site.port}: cannot listen there" in answer.err


# Bounds


@pytest.fixture
def wide(tmp_path):
    """Return the index of eight red PNGs of 600 x 500."""
    out = io.BytesIO()
    Image.new("RGB", (600, 500), "red").save(out, "PNG")
    members = [member for n in range(8) for member in ((f"k{n}.png", out.getvalue()), (f"k{n}.cls", b"0"))]
    return scan(str(write_tar(tmp_path / "t.tar", members)), class_names=["a"])[0]


@pytest.mark.parametrize("size_alone", [False, True])
def test_requests_decode_within_one_budget(wide, monkeypatch, size_alone):
    decoding, most = [], []
    load = PngImagePlugin.PngImageFile.load

    def watched(image):
        if image.size != (600, 500) or not image.tile:
            return load(image)
        decoding.append(image)
        most.append(len(decoding))
        time.sleep(0.05)
        try:
            return load(image)
        finally:
            decoding.pop()

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", watched)
    monkeypatch.setattr(pictures, "_decoding", pictures.Budget(2_420_000))
    ask = pictures.upright_size if size_alone else functools.partial(pictures.thumbnail, side=60)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda row: ask(wide, row), range(8)))
    assert (len(most), max(most)) == (8, 2)
    if size_alone:
        assert set(made) == {(600, 500)}
    else:
        assert min(Image.open(io.BytesIO(data)).getpixel((30, 25))[0] for data in made) > 200


def test_image_beyond_the_budget_is_stated_by_its_size(wide, monkeypatch):
    monkeypatch.setattr(pictures, "_decoding", pictures.Budget(4 * 600 * 500 - 1))
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", lambda _: pytest.fail("it was decoded"))
    stated = Image.open(io.BytesIO(pictures.thumbnail(wide, 0, 60)))
    assert stated.size == (60, 50)
    assert min(stated.getpixel((55, 45))) > 200


MEASURE = """
import io, sys
from PIL import Image
from bigscl.tools.viewer import pictures
files = [bytearray(open(name, "rb").read()) for name in sys.argv[1:]]
pictures.read_encoded = lambda index, row: files[row]
held, hold = [0], pictures.Budget.hold
pictures.Budget.hold = lambda budget, size: held.append(size) or hold(budget, size)
peak = lambda: 1024 * int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
for row, data in enumerate(files):
    Image.open(io.BytesIO(data)).resize((2, 2), box=(0, 0, 2, 2))  # imports the format's plugin
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    pictures.thumbnail(None, row, 256)
    print(peak() - before, held[-1])
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's peak of memory")
def test_decoding_takes_no_more_than_is_held_for_it(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    forms = [("PNG", "RGB", {}), ("PNG", "RGBA", {}), ("PNG", "LA", {}), ("WEBP", "RGB", {"quality": 1})]
    forms += [("JPEG", "RGB", {}), ("JPEG", "CMYK", {"progressive": True}), ("BMP", "RGB", {})]
    for form, mode, options in forms:
        image = Image.radial_gradient("L").resize((2600, 2000)).convert(mode)
        options |= {} if form == "BMP" else {"exif": exif}
        image.save(tmp_path / f"{form}-{mode}", form, **options)
    files = sorted(tmp_path.iterdir())
    command = [sys.executable, "-c", MEASURE, *files]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    for file, line in zip(files, done.stdout.splitlines(), strict=True):
        taken, held = map(int, line.split())
        assert taken < held + 6_000_000, file.name
        assert held < 4 * taken + 6_000_000, file.name


THREADS = """
import io, threading
from PIL import Image
from bigscl.tools.viewer import pictures
out = io.BytesIO()
Image.new("RGB", (3000, 2500)).save(out, "PNG")
data = bytearray(out.getvalue())
pictures.read_encoded = lambda index, row: data
pictures._decoding = pictures.Budget(40_000_000)
memory = lambda kind: 1024 * int(open("/proc/self/status").read().split(kind)[1].split()[0])
before = memory("VmRSS:")
threads = [threading.Thread(target=pictures.thumbnail, args=(None, 0, 256)) for _ in range(12)]
for each in threads:
    each.start()
for each in threads:
    each.join()
print(memory("VmHWM:") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's peak of memory")
def test_requests_in_many_threads_take_no_more_memory_than_the_budget():
    """Each thread has a heap of its own, which may keep what it frees."""
    command = [sys.executable, "-c", THREADS]
    taken = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert taken < 40_000_000 + 20_000_000


def test_dripping_clients_are_dropped_and_others_answered(folder, monkeypatch):
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 5)
    with serving(folder / "dense") as site, ExitStack() as stack:

        def connect():
            connection = socket.create_connection(("127.0.0.1", site.port), timeout=10)
            connection.sendall(b"GET /api/runs HTTP/1.1\r\nX: ")
            return stack.enter_context(connection)

        dripping = [connect() for _ in range(20)]
        assert site.ask("/api/runs").status == 200
        assert dripping[0].recv(1) == b""
        assert len(site.server._deadlines) <= 5
        monkeypatch.setattr(server, "SECONDS_FOR_A_REQUEST", 0.5)
        slow, started = connect(), time.monotonic()

        def drip():
            while time.monotonic() < started + 8:
                slow.sendall(b"x")
                time.sleep(0.05)

        with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
            drip()
        assert site.ask("/api/runs").status == 200


@pytest.mark.parametrize(
    "headers",
    [
        "Content-Length: {}",
        "Content-Length: 0\r\nContent-Length: {}",
        "Content-Length : {}",
        "no header\r\nContent-Length: {}",
        "Transfer-Encoding: chunked",
    ],
)
def test_body_of_a_read_is_not_the_next_request(site, headers):
    own = f"Host: 127.0.0.1:{site.port}\r\n"
    inner = f"GET /api/runs HTTP/1.1\r\n{own}\r\n"
    with socket.create_connection(("127.0.0.1", site.port), timeout=10) as connection:
        connection.sendall(f"GET / HTTP/1.1\r\n{own}{headers.format(len(inner))}\r\n\r\n{inner}".encode())
        with connection.makefile("rb") as answer:
            got = answer.read()
    assert got.startswith(b"HTTP/1.1 4")
    assert got.count(b"HTTP/1.1") == 1
    assert b"Connection: close" in got
