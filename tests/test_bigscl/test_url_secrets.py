"""URLs without their secrets: what is shown, what a request gets, and what texts of others say."""

import logging
import os

import pytest

from bigscl.common import url_secrets
from bigscl.common.url_secrets import VARIABLE, hide, public, take, take_words, with_image_names, with_secret
from bigscl.common.user_error import UserError
from bigscl.config import ConfigError, load_config
from bigscl.data.open_tar import Unreadable, open_shard
from bigscl.data.tar import expand
from bigscl.store import StoreError, list_objects, open_backend

SECRET = "s3cr3t-value-of-a-signature"


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    """Nothing of other tests, and nothing left for them."""
    for name in ("_given", "_complete"):
        monkeypatch.setattr(url_secrets, name, {})
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host/a.tar?sig=x%2F&se=1", "https://host/a.tar"),
        ("https://host/train-{000..003}.tar?sig=x&se=1", "https://host/train-{000..003}.tar"),
        ("https://host/{a.tar?sig=1,b.tar?sig={2}}", "https://host/{a.tar,b.tar}"),
        ("{https://u:p@h/a.tar?s=1,https://h/b.tar?s=2}", "{https://h/a.tar,https://h/b.tar}"),
        ("https://h/a.tar?sp=r,w&sig=1", "https://h/a.tar"),
        ("https://user:p@ss@host:8080/a.tar", "https://host:8080/a.tar"),
        ("HTTPS://token@host/a.tar#part", "HTTPS://host/a.tar"),
        ("s3://key:secret@bucket/a", "s3://bucket/a"),
        ("az://box/train-*.tar?sv=1&sig=2", "az://box/train-*.tar"),
        # Nothing secret: globs, snapshots, paths.
        ("s3://bucket/train-00?.tar", "s3://bucket/train-00?.tar"),
        ("s3://bucket/store@7", "s3://bucket/store@7"),
        ("memory://name@7", "memory://name@7"),
        ("shards/train-0?.tar", "shards/train-0?.tar"),
        ("pipe:cat shards/a.tar", "pipe:cat shards/a.tar"),
        # A command: its name, and what it reads.
        ("pipe:cat a.tar | pigz -d", "pipe:cat a.tar ..."),
        ("pipe:curl -H 'Authorization: Bearer x' 'https://h/a.tar?sig=1'", "pipe:curl https://h/a.tar ..."),
        ("pipe:TOKEN=abc get 7", "pipe:get ..."),
    ],
)
def test_the_public_form_of_a_url_has_no_secret(url, shown):
    assert public(url) == shown
    assert public(shown) == shown


def test_a_request_gets_what_was_given_last(monkeypatch):
    pattern = f"https://host/train-{{0..1}}.tar?sig={SECRET}"
    monkeypatch.setenv(VARIABLE, "https://user:old@host/train-{0..2}.tar\n\npipe:get 3 a.tar\n")
    assert with_secret("https://host/train-0.tar") == "https://user:old@host/train-0.tar"
    assert expand(pattern) == ["https://host/train-0.tar", "https://host/train-1.tar"]
    assert with_secret("https://host/train-0.tar").endswith(SECRET)
    assert take(pattern.replace(SECRET, "new")) == "https://host/train-{0..1}.tar"
    assert with_secret("https://host/train-1.tar") == "https://host/train-1.tar?sig=new"
    assert with_secret("https://host/train-2.tar") == "https://user:old@host/train-2.tar"
    assert with_secret("pipe:get a.tar ...") == "pipe:get 3 a.tar"
    assert with_secret("https://host/other.tar") == "https://host/other.tar"


def test_another_process_gets_the_secrets(monkeypatch):
    monkeypatch.setenv(VARIABLE, "https://u:p@host/a.tar")
    take(f"https://host/{{b,c}}.tar?sig={SECRET}")
    variables = url_secrets.environment()
    monkeypatch.setattr(url_secrets, "_given", {})
    monkeypatch.setattr(url_secrets, "_complete", {})
    url_secrets.receive(variables)
    assert with_secret("https://host/c.tar").endswith(SECRET)
    assert with_secret("https://host/a.tar") == "https://u:p@host/a.tar"
    assert os.environ[VARIABLE] == variables[VARIABLE]


def test_a_command_that_nobody_gave_is_not_run(tmp_path):
    url = expand(f"pipe:cat {tmp_path}/a.tar; touch {tmp_path}/ran")[0]
    assert url == f"pipe:cat {tmp_path}/a.tar ..."
    url_secrets._complete.clear()
    with pytest.raises(Unreadable, match=rf"its command is not known here.*{VARIABLE}"):
        open_shard(url, allow_pipe=True)
    assert not list(tmp_path.iterdir())


def test_urls_that_differ_in_their_query_alone_are_one_shard():
    with pytest.raises(UserError, match=r"https://h/get: named more than once.* after the \?") as error:
        expand([f"https://h/get?name=a&sig={SECRET}", "https://h/get?name=b"])
    assert SECRET not in str(error.value)


def test_words_of_a_command_line_lose_their_secrets():
    words = [
        "train",
        f"--data.train=https://h/a.tar?sig={SECRET}",
        "--data.val",
        f"https://u:{SECRET}@h/b.tar",
    ]
    assert take_words(words) == ["train", "--data.train=https://h/a.tar", "--data.val", "https://h/b.tar"]
    assert SECRET in with_secret("https://h/a.tar")
    assert SECRET in with_secret("https://h/b.tar")


@pytest.mark.parametrize("at", ["s3://key:{}@bucket/x", "az://box/x?sig={}", "https://u:{}@host/x"])
def test_a_store_is_not_opened_by_a_url_with_a_secret(at, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "me")
    for call in (open_backend, list_objects):
        if call is open_backend or "https" not in at:
            with pytest.raises(StoreError, match=r"environment|no stores behind") as error:
                call(at.format(SECRET))
            assert SECRET not in str(error.value)


def test_texts_of_others_lose_secrets(caplog):
    take(f"https://user:{SECRET}@host/a.tar?sig=abcdefghijklmnop%2Fqrst&se=1")
    take(f"pipe:curl -H 'Authorization: {SECRET}2' https://h/b.tar")
    text = (
        f"GET https://user:{SECRET}@host/a.tar?sig=abcdefghijklmnop%2Fqrst&se=1: 403; abcdefghijklmnop/qrst "
        f"is wrong, user {SECRET}; curl -H 'Authorization: {SECRET}2': no; see https://x/?token=unknown now"
    )
    url_secrets.hide_in_logs()
    try:
        raise OSError(text)
    except OSError:
        logging.getLogger("elsewhere").exception("failed: %s", text)
    for shown in (hide(text), caplog.text):
        assert "host/a.tar" in shown
        assert "https://x/ now" in shown
        assert not [secret for secret in (SECRET, "abcdefghijklmnop", "unknown") if secret in shown]


def test_errors_of_a_config_quote_no_secret(tmp_path):
    path = tmp_path / "config.yaml"
    for text in (
        f"data: {{train: 'https://user:{SECRET}@host/a.tar', oops: [}}",
        f"data: {{train: 'https://host/a.tar?sig={SECRET}', val: 7}}",
    ):
        path.write_text(text)
        for overrides in ([], [f"--data.val=https://u:{'x' * 70}{SECRET}@h: : ["]):
            with pytest.raises(ConfigError) as error:
                load_config(path, overrides)
            assert SECRET not in str(error.value)
            assert "xxx" not in str(error.value)


def test_a_query_that_names_images_stays():
    for images in ("http://ls:8080/data/local-files/?d=", "http://ls/?d=voc/", "http://ls/?d=voc/{key}.jpg"):
        assert with_image_names(take(images)) == images
    assert with_image_names(take(f"https://u:p@host/{{key}}?sig={SECRET}")) == "https://host/{key}"
