"""Export a folder of ONNX Runtime GenAI's model builder unchanged.

In: a folder with genai_config.json, a graph, its weights and a tokenizer. Out: an artifact with
these files (hard links if the file system allows) and a manifest. Models that would not run
correctly are refused: models with states that cannot be rolled back, with several graphs, or with
unknown inputs. If the graph ignores the configured attention window, the artifact's context is
limited to the window.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.genai.genai_config import HIDDEN_STATES, read_genai_config
from pilotfish.engines.manifest import (
    GENAI,
    GENAI_NAME,
    GRAPH_NAME,
    MANIFEST_NAME,
    TOKENIZER_NAME,
    Dimensions,
    Source,
)
from pilotfish.export.atomic import link_or_copy, replacing
from pilotfish.export.chat_check import check_chat
from pilotfish.export.export_errors import ExportError
from pilotfish.export.genai_graph import read_graph
from pilotfish.export.manifest_writer import write_manifest
from pilotfish.export.sources.directory_vocabulary import read_vocabulary
from pilotfish.export.sources.hashing import hash_files
from pilotfish.export.sources.source import Progress, silent

log = logging.getLogger("pilotfish.export")


def copy_genai(
    source: str,
    out: str | Path,
    *,
    ignored: Collection[str] = (),
    progress: Progress | None = None,
) -> Artifact:
    """Write an artifact of the dialect genai to `out`, replacing an artifact there.

    ignored: keys of the tokenizer's settings to ignore; "chat_template" omits the chat templates.

    Raises:
        ExportError: if the folder is damaged or does not come from the builder, or if its model,
        tokenizer or chat template is unusable.
    """
    report = progress or silent
    folder = Path(source)
    if not (folder / GENAI_NAME).is_file():
        raise ExportError(
            f"{source} has no {GENAI_NAME}: the dialect {GENAI} needs a folder of ONNX Runtime "
            "GenAI's model builder"
        )
    try:
        config = read_genai_config(folder / GENAI_NAME)
    except ArtifactError as error:
        raise ExportError(str(error)) from None
    graph = read_graph(folder, config)
    if graph.reason:
        log.warning(
            "%s: the context is limited to %d positions, because %s",
            folder.name,
            graph.context,
            graph.reason,
        )
    logits, model = graph.form.widths["logits"], config.model
    stated = {"bos_token_id": model.bos_token_id, "eos_token_id": model.eos_token_id}
    limit, name = f"its graph has logits of only {logits}", folder.resolve().name
    vocabulary, tokenizer_files, dropped = read_vocabulary(
        folder, name, logits, limit, [stated], ignored
    )
    warnings = check_chat(vocabulary)
    with replacing(Path(out)) as directory:
        [graph_name, *data] = graph.files
        targets = {graph_name: GRAPH_NAME, GENAI_NAME: GENAI_NAME, **{each: each for each in data}}
        if len({*targets.values(), TOKENIZER_NAME, MANIFEST_NAME}) < len(targets) + 2:
            raise ExportError(
                f"{folder}: two files of the graph would have the same name in the artifact"
            )
        for name_in_source, target in targets.items():
            link_or_copy(folder / name_in_source, directory / target)
        # Hash the artifact's files, because the source's files may change at any time.
        digests = hash_files([directory / target for target in targets.values()], report)
        read = {name_in_source: digests[target] for name_in_source, target in targets.items()}
        origin = Source(
            kind="directory",
            location=folder.resolve().name,
            sha256=read | hash_files(tokenizer_files, silent),
            ignored_keys=list(ignored),
            left_out=dropped,
        )
        section = config.model.decoder
        write_manifest(
            directory,
            vocabulary,
            digests,
            source=origin,
            architecture=config.model.type,
            precision=GENAI,
            dialect=GENAI,
            opset=graph.opset,
            dimensions=Dimensions(
                layers=section.num_hidden_layers,
                hidden=section.hidden_size,
                heads=section.num_attention_heads,
                kv_heads=section.num_key_value_heads,
                head_dim=section.head_size,
                # a placeholder: the real width is unknown and not used
                intermediate=section.hidden_size,
                context=graph.context,
            ),
            padded_vocab_size=logits,
            kv_dtype=graph.form.kv_dtype,
            warnings=warnings,
            window=graph.window,
            trees=False,
            hidden_states=HIDDEN_STATES in graph.form.widths,
        )
    return Artifact.open(out)
