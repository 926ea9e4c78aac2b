"""Findings as SARIF: valid under the standard's schema, every finding once, where its bytes are."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import jsonschema
import pytest

from audit.editing import at, edit, edit_config, quantized
from narrowcast.audit.rules import rules
from narrowcast.audit.run import Audit, audit
from narrowcast.report.sarif import sarif_text

SCHEMA = json.loads((Path(__file__).parent / "sarif" / "sarif-schema-2.1.0.json").read_text())
SCALE = "model.layers.0.mlp.up_proj.weight_scale"


def run(found: Audit) -> dict[str, Any]:
    """The one run of the log, valid under the schema."""
    log = json.loads(sarif_text(found))
    jsonschema.Draft4Validator(SCHEMA).validate(log)
    (only,) = log["runs"]
    assert [one["ruleId"] for one in only["results"]] == [one.rule for one in found.findings]
    for one in only["results"]:
        assert only["tool"]["driver"]["rules"][one["ruleIndex"]]["id"] == one["ruleId"]
    return only


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    model = quantized(tmp_path, "nvfp4a16")
    edit(model, {SCALE: at((3, 1), 0x7F), SCALE.replace("layers.0", "layers.1"): None})
    edit_config(model, lambda config: config["quantization_config"]["ignore"].append("lm_hed"))
    return model


def test_the_schema_refuses_what_is_no_log() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft4Validator(SCHEMA).validate({"version": "2.1.0", "runs": [{"results": []}]})


def test_a_tensor_lies_at_its_bytes(broken: Path) -> None:
    only = run(audit(broken))
    (result,) = [one for one in only["results"] if one["ruleId"] == "NC110"]
    location = result["locations"][0]
    assert location["logicalLocations"][0]["fullyQualifiedName"] == SCALE
    place = location["physicalLocation"]
    base = only["originalUriBaseIds"][place["artifactLocation"]["uriBaseId"]]["uri"]
    file = Path(unquote(urlparse(base + place["artifactLocation"]["uri"]).path))
    assert file == broken / "model.safetensors"
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    begin, end = header[SCALE]["data_offsets"]
    assert place["region"] == {"byteOffset": 8 + size + begin, "byteLength": end - begin}
    assert content[place["region"]["byteOffset"] :][3 * header[SCALE]["shape"][1] + 1] == 0x7F


def test_modules_and_files_are_found(broken: Path) -> None:
    found = audit(broken)
    places = {
        one.tensor: result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        for one, result in zip(found.findings, run(found)["results"], strict=True)
    }
    assert places["config.json"] == "config.json"
    assert places[None] == "config.json"  # about the whole model
    assert {uri for name, uri in places.items() if name and name.startswith("model.layers")} == {
        "model.safetensors"
    }


def test_levels_silences_and_rules_not_run(broken: Path) -> None:
    found = audit(broken, quick=True, ignore=["NC110=known to the author"])
    only = run(found)
    for one, result in zip(found.findings, only["results"], strict=True):
        assert result["level"] == {"error": "error", "warning": "warning", "info": "note"}[one.severity or ""]
    (silenced,) = [one for one in only["results"] if "suppressions" in one]
    assert silenced["suppressions"] == [{"kind": "external", "justification": "known to the author"}]
    (invocation,) = only["invocations"]
    assert invocation["executionSuccessful"]
    assert invocation["exitCode"] == int(not found.passed) == 1
    unrun = {one["associatedRule"]["id"] for one in invocation["toolConfigurationNotifications"]}
    assert unrun == {rule.code for rule, _ in found.skipped} > set()
    assert [rule["id"] for rule in only["tool"]["driver"]["rules"]] == list(rules())


def test_the_same_finding_keeps_its_fingerprint(broken: Path) -> None:
    before = {one["partialFingerprints"]["ruleAndTensor/v1"] for one in run(audit(broken))["results"]}
    edit(broken, {SCALE: at((5, 0), 0x7F)})
    after = run(audit(broken))
    assert before == {one["partialFingerprints"]["ruleAndTensor/v1"] for one in after["results"]}


def test_a_folder_that_no_container_reads(tmp_path: Path) -> None:
    model = quantized(tmp_path, "fp8_dynamic")
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert {one["level"] for one in run(audit(model))["results"]} >= {"error"}
