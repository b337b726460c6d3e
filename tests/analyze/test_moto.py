"""moto's S3, an independent server, beside that of `support.object_store`; skipped without it (`make test-ray`)."""

from __future__ import annotations

import pytest
from support import sample_files
from support.object_store import serve

from thdprof.analyze.sources import read_dataset

pytest.importorskip("moto")
LOCATIONS = ("s3://bucket/deep dir", "s3://bucket/deep dir/rows*.parquet", "s3://bucket/*/rows ?.parquet")


def test_both_servers_give_the_same_dataset(tmp_path, monkeypatch):
    import boto3
    from moto.server import ThreadedMotoServer

    files = tmp_path / "store" / "bucket" / "deep dir"
    files.mkdir(parents=True)
    sample_files.write_bridge(files / "rows 1.parquet", [[5, 6], [7]])
    sample_files.write_bridge(files / "rows 2.parquet", [[8], [7, 7, 7]])
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    server = ThreadedMotoServer(port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        moto = f"http://{host}:{port}"
        client = boto3.client("s3", endpoint_url=moto, region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        for path in files.iterdir():
            client.upload_file(str(path), "bucket", f"deep dir/{path.name}")
        found = []
        with serve(tmp_path / "store") as own:
            for number, endpoint in enumerate((moto, own.endpoint)):
                monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
                found += [read_dataset([where], cache=tmp_path / f"kept-{number}") for where in LOCATIONS]
    finally:
        server.stop()
    assert len({(dataset.fingerprint, dataset.uris) for dataset in found}) == 1
    assert found[0].fingerprint == read_dataset([str(files)]).fingerprint
