"""What the API server refuses across fields: CEL rules, each saying what to change.

Paths are those of the schema; `[]` is an item of a list. A rule may compare with nothing that is
changed by itself: replicas can always be lowered.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from specdecode_operator.api import metadata, refused
from specdecode_operator.api.v1alpha1 import MAX_BATCH, CudagraphMode, Switch


@dataclass(frozen=True)
class Rule:
    """A CEL rule; `message` is a sentence, `message_cel` an expression that makes a better one.

    `pardon` is an expression over `oldSelf`, for rules that the API server checks again although
    what they speak of did not change: an object that was stored with it may keep it. Sizes below
    `oldSelf.value()` count as unbounded, so it may look at single values only.
    """

    cel: str
    message: str
    message_cel: str = ""
    field: str = ""
    pardon: str = ""

    def to_schema(self) -> dict[str, Any]:
        """Render an item of x-kubernetes-validations."""
        pardoned = f"({self.cel}) || (oldSelf.hasValue() && {self.pardon})"
        wanted = {
            "rule": pardoned if self.pardon else self.cel,
            "message": self.message,
            "messageExpression": self.message_cel,
            "fieldPath": self.field,
            "optionalOldSelf": bool(self.pardon),
        }
        return {key: value for key, value in wanted.items() if value}


def _one_of(values: Iterable[object]) -> str:
    return json.dumps(list(values))


def _map_of(values: Mapping[str, str]) -> str:
    return json.dumps(dict(values))


ROW_STARTS: Final = [1, *(2**n + 1 for n in range(MAX_BATCH.bit_length() - 1))]

_KEY: Final = "self.split('=', 2)[0]"


def _with_shorts(flags: Iterable[str]) -> list[str]:
    """Add the one-dash forms of flags."""
    wanted = list(flags)
    return wanted + [short for short, flag in refused.SHORT_FLAGS.items() if flag in wanted]


def _flag_rules() -> tuple[Rule, ...]:
    fields = {
        flag: refused.FLAG_FIELDS[refused.SHORT_FLAGS.get(flag, flag)]
        for flag in _with_shorts(refused.FLAG_FIELDS)
    }
    return (
        Rule(
            f"!({_KEY} in {_map_of(fields)})",
            "a field of the spec sets this flag: leave it out",
            message_cel=f"{_KEY} + ' is refused here: set ' + {_map_of(fields)}[{_KEY}] + "
            "' instead'",
        ),
        *(
            Rule(
                f"!({_KEY} in {_one_of(_with_shorts(flags))})",
                reason,
                message_cel=f"{_KEY} + ' is refused here: ' + {json.dumps(reason)}",
            )
            for flags, reason in refused.FLAG_REASONS.items()
        ),
    )


def _variable_rules() -> tuple[Rule, ...]:
    names = refused.VARIABLE_REASONS.items()
    prefixes = refused.REFUSED_VARIABLE_PREFIXES.items()
    cases = [(f"self in {_one_of(listed)}", reason) for listed, reason in names]
    cases += [(f"self.startsWith('{prefix}')", reason) for prefix, reason in prefixes]
    return tuple(
        Rule(
            f"!({case})",
            reason,
            message_cel=f"self + ' is refused here: ' + {json.dumps(reason)}",
        )
        for case, reason in cases
    )


_AGAINST_AV: Final = _with_shorts(sorted(refused.FLAGS_AGAINST_ADAPTIVE_VERIFICATION))
_HAS_BOTH: Final = "has(self.speculation) && has(self.engine.extraArgs)"
# Lists below oldSelf.value() cannot be compared: their size is what tells an edit.
_SAME_ARGUMENTS: Final = (
    "has(oldSelf.value().speculation) && has(oldSelf.value().engine.extraArgs) && "
    "oldSelf.value().engine.extraArgs.size() == self.engine.extraArgs.size()"
)
_NO_FLAG: Final = Rule(
    "!self.startsWith('-')",
    "must not start with '-': vLLM would read it as a flag",
)
_NOT_ZERO: Final = Rule("self.matches('[1-9]')", "must be longer than 0, for example 30m")

RULES: Final[Mapping[str, tuple[Rule, ...]]] = {
    "": (
        Rule(
            f"size(self.metadata.name) <= {metadata.MAX_NAME_LENGTH} && "
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            f"metadata.name names a Service and labels: at most {metadata.MAX_NAME_LENGTH} lower "
            "case letters, digits and hyphens, a letter first, no hyphen last",
            pardon="true",
        ),
    ),
    "spec": (
        Rule(
            "!has(self.speculation) || self.tuning.minK <= self.speculation.numSpeculativeTokens",
            "tuning.minK is above speculation.numSpeculativeTokens: lower minK",
            field=".tuning.minK",
            pardon="has(oldSelf.value().speculation) && "
            "oldSelf.value().tuning.minK > oldSelf.value().speculation.numSpeculativeTokens",
        ),
        Rule(
            f"!({_HAS_BOTH} && self.speculation.adaptiveVerification == '{Switch.ENABLED}' && "
            f"self.engine.extraArgs.exists(a, a.split('=', 2)[0] in {_one_of(_AGAINST_AV)}))",
            f"vLLM refuses adaptive verification together with {', '.join(_AGAINST_AV)}: leave the "
            "flag out of engine.extraArgs, or set speculation.adaptiveVerification to Disabled",
            field=".engine.extraArgs",
            pardon=f"{_SAME_ARGUMENTS} && "
            f"oldSelf.value().speculation.adaptiveVerification == '{Switch.ENABLED}'",
        ),
        Rule(
            f"!({_HAS_BOTH} && self.speculation.cudagraphMode != '{CudagraphMode.NONE}' && "
            f"self.engine.extraArgs.exists(a, a == '{refused.EAGER}'))",
            f"{refused.EAGER} records no CUDA graphs: leave it out of engine.extraArgs, or set "
            "speculation.cudagraphMode to NONE",
            field=".engine.extraArgs",
            pardon=f"{_SAME_ARGUMENTS} && "
            f"oldSelf.value().speculation.cudagraphMode != '{CudagraphMode.NONE}'",
        ),
    ),
    "spec.model.name": (_NO_FLAG,),
    "spec.model.revision": (_NO_FLAG,),
    "spec.model.servedName": (_NO_FLAG,),
    "spec.model.cache": (
        Rule(
            "(has(self.claimName) ? 1 : 0) + (has(self.hostPath) ? 1 : 0) + "
            "(has(self.emptyDir) && self.emptyDir ? 1 : 0) == 1",
            "set exactly one of claimName, hostPath and emptyDir: true",
        ),
    ),
    "spec.engine.startupTimeout": (_NOT_ZERO,),
    "spec.engine.extraArgs": (
        Rule(
            "self.size() == 0 || self[0].startsWith('-')",
            "begin with a flag: the model and the command are the operator's",
        ),
    ),
    "spec.engine.extraArgs[]": _flag_rules(),
    "spec.engine.env[]": (
        Rule(
            "!has(self.value) || !has(self.valueFrom)",
            "has both value and valueFrom: keep one of them",
        ),
    ),
    "spec.engine.env[].name": _variable_rules(),
    "spec.speculation": (
        Rule(
            f"self.adaptiveVerification != '{Switch.ENABLED}' || "
            "self.cudagraphMode.startsWith('FULL')",
            "adaptive verification needs full CUDA graphs: set cudagraphMode to "
            "FULL_AND_PIECEWISE, FULL_DECODE_ONLY or FULL, or adaptiveVerification to Disabled",
            field=".cudagraphMode",
        ),
        Rule(
            "has(self.draftModel) || "
            f"!(self.method in {_one_of(sorted(refused.METHODS_WITH_DRAFT_MODEL))})",
            "this method drafts with a model of its own: set draftModel",
            message_cel="'the method ' + self.method + ' drafts with a model of its own: set "
            "draftModel'",
            field=".draftModel",
        ),
        Rule(
            "!has(self.envelope) || self.envelope.all(k, k <= self.numSpeculativeTokens)",
            "a K is above numSpeculativeTokens: take it out, or raise numSpeculativeTokens",
            field=".envelope",
        ),
        Rule(
            "!has(self.kTable) || self.kTable.all(r, r.k <= self.numSpeculativeTokens)",
            "a row's k is above numSpeculativeTokens: lower k, or raise numSpeculativeTokens",
            field=".kTable",
        ),
        Rule(
            "!has(self.kTable) || !has(self.envelope) || self.envelope.size() == 0 || "
            "self.kTable.all(r, r.k == 0 || r.k >= self.numSpeculativeTokens || "
            "r.k in self.envelope)",
            "a row's k is not in the envelope, which the engine prepares at start-up: add it to "
            "envelope, or choose one of its values, 0 or numSpeculativeTokens",
            field=".kTable",
        ),
        Rule(
            "!has(self.kTable) || (has(self.envelope) && self.envelope.size() > 0) || "
            "self.kTable.all(r, r.k in [0, 1, (self.numSpeculativeTokens + 1) / 2] || "
            "r.k >= self.numSpeculativeTokens)",
            "without an envelope the engine prepares K = 0, 1, about half of "
            "numSpeculativeTokens, and numSpeculativeTokens: list every k of the table in envelope",
            field=".kTable",
        ),
    ),
    "spec.speculation.kTable": (
        Rule("self.size() == 0 || self[0].minBatch == 1", "let the first row have minBatch 1"),
        Rule(
            "self.map(r, r.minBatch).isSorted() && "
            "self.all(r, self.exists_one(s, s.minBatch == r.minBatch))",
            "minBatch must rise from row to row: sort the rows, and give each start once",
        ),
    ),
    "spec.speculation.kTable[].minBatch": (
        Rule(
            f"self in {_one_of(ROW_STARTS)}",
            "a row starts at 1 or 2^n + 1, as the engine's metrics are bucketed: "
            "1, 2, 3, 5, 9, 17, 33, 65, ...",
        ),
    ),
}
