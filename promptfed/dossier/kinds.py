"""The sections of each kind of dossier: the provisions that each answers, its facts, and what only a person can say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["dpia", "ai-act-annex-iv", "hipaa"]


@dataclass(frozen=True)
class Section:
    """A heading; ``provisions``: what it answers, by number; keys of ``facts``; ``blanks`` for a person to fill."""

    title: str
    provisions: Sequence[str]
    facts: Sequence[str] = ()
    blanks: Sequence[str] = ()


@dataclass(frozen=True)
class Form:
    """A kind of dossier; ``law``: where its provisions are found."""

    title: str
    law: str
    sections: Sequence[Section]


WHO = ("participants", "trainers", "evaluators", "images", "classes", "site_consents", "site_shown")
HOW = (
    "method",
    "training",
    "aggregation",
    "participation",
    "settings",
    "rounds_planned",
    "rounds_done",
    "backbone",
    "site_trained",
)
LEFT = (
    *("updates", "bytes_up", "bytes_down", "sent_by"),
    *("site_bytes", "site_sent", "site_accepted", "site_asked", "site_evaluated"),
)
PROTECTED = (
    *("privacy_level", "privacy_noise", "privacy_clip", "epsilon_allowed", "epsilon_spent", "epsilon_central"),
    *("secure", "smallest_sum", "privacy_warnings"),
)
MEASURED = ("evaluated_round", "evaluation", "subgroups", "withheld")
INCIDENTS = (
    *("failures", "late", "refusals", "withdrawn", "acts", "verdicts"),
    *("site_refused", "site_repeated"),
)
AUDITED = ("audit_entries", "audit_chain", "public_key", "signed", "site_from", "site_to", "site_lines", "site_chain")
VERSIONS = ("id", "state", "created", "started", "ended", "state_hash", "states", "fingerprint", "origin", "licence")

DPIA = Form(
    "Data protection impact assessment (draft)",
    "Regulation (EU) 2016/679 (GDPR), OJ L 119, 4.5.2016, p. 1",
    (
        Section(
            "Processing and its purposes",
            ("Art. 35(7)(a)",),
            ("name", *VERSIONS[:5], *HOW, *WHO),
            (
                "purposes of the processing",
                "legitimate interest, where one is pursued",
                "controllers, processors and their contracts (Art. 26, 28)",
                "categories of data subjects and of images; special categories (Art. 9)",
            ),
        ),
        Section(
            "Necessity and proportionality",
            ("Art. 35(7)(b)", "Art. 5(1)(c)", "Art. 5(1)(e)"),
            (*LEFT, "retention"),
            (
                "legal basis (Art. 6, Art. 9(2))",
                "why less data, or no federation, would not do",
                "information of data subjects and how they exercise their rights (Art. 12 to 22)",
                "transfers to third countries (Art. 44 to 49)",
            ),
        ),
        Section(
            "Risks to data subjects",
            ("Art. 35(7)(c)",),
            (*INCIDENTS,),
            ("likelihood and severity of each risk", "risks at each site: access, re-identification, loss"),
        ),
        Section(
            "Measures",
            ("Art. 35(7)(d)", "Art. 25", "Art. 32"),
            (*PROTECTED, "admission", *AUDITED),
            ("organisational measures", "residual risk, and whether the authority is consulted (Art. 36)"),
        ),
        Section("Erasure", ("Art. 17",), ("forgotten", "site_repeated"), ("requests received, and their answers",)),
        Section(
            "Advice, views, review",
            ("Art. 35(2)", "Art. 35(9)", "Art. 35(11)"),
            (),
            ("advice of the data protection officer", "views of data subjects", "date of the next review", "signature"),
        ),
    ),
)

ANNEX_IV = Form(
    "Technical documentation (draft)",
    "Regulation (EU) 2024/1689 (AI Act), OJ L, 2024/1689, 12.7.2024",
    (
        Section(
            "General description",
            ("Annex IV(1)",),
            ("name", *VERSIONS, "backbone"),
            (
                "intended purpose; provider; version as placed on the market (1(a))",
                "hardware and software that it interacts with, and its markings (1(b) to 1(f))",
                "user interface and instructions for use (1(g), 1(h))",
            ),
        ),
        Section(
            "Development: methods and design",
            ("Annex IV(2)(a)", "Annex IV(2)(b)", "Annex IV(2)(c)"),
            HOW,
            ("design choices and assumptions, about persons in particular", "what the system is to optimise for"),
        ),
        Section(
            "Data",
            ("Annex IV(2)(d)",),
            (*WHO, *LEFT),
            ("provenance, selection, labelling and cleaning at each site", "known gaps of the data"),
        ),
        Section(
            "Human oversight, predetermined changes",
            ("Annex IV(2)(e)", "Annex IV(2)(f)"),
            (),
            ("measures under Art. 14", "changes that are planned"),
        ),
        Section(
            "Validation and testing",
            ("Annex IV(2)(g)",),
            MEASURED,
            ("metrics that matter for the purpose, and thresholds", "test logs, dated and signed"),
        ),
        Section("Cybersecurity", ("Annex IV(2)(h)",), (*PROTECTED, "admission", *AUDITED), ("measures of deployment",)),
        Section(
            "Monitoring, functioning and control",
            ("Annex IV(3)",),
            (*MEASURED, *INCIDENTS),
            ("foreseeable unintended outcomes", "specification of input data"),
        ),
        Section("Appropriateness of metrics", ("Annex IV(4)",), (), ("why these metrics fit the purpose",)),
        Section("Risk management", ("Annex IV(5)",), (), ("the system under Art. 9",)),
        Section(
            "Changes over the lifecycle",
            ("Annex IV(6)",),
            ("acts", "forgotten", "site_repeated"),
            ("changes by the provider",),
        ),
        Section(
            "Standards, declaration, post-market monitoring",
            ("Annex IV(7)", "Annex IV(8)", "Annex IV(9)"),
            (),
            ("harmonised standards that are applied", "EU declaration of conformity", "post-market monitoring plan"),
        ),
    ),
)

HIPAA = Form(
    "Privacy and security documentation (draft)",
    "45 CFR Part 164 (HIPAA), Electronic Code of Federal Regulations",
    (
        Section(
            "Parties and agreements",
            ("§ 164.308(b)", "§ 164.504(e)"),
            ("name", *VERSIONS[:5], *WHO),
            ("covered entities and business associates", "business associate agreements, with dates"),
        ),
        Section(
            "De-identification, minimum necessary",
            ("§ 164.502(b)", "§ 164.514(a)", "§ 164.514(b)", "§ 164.514(d)"),
            (*LEFT, "retention"),
            ("method of de-identification at each site, and its expert or checklist", "why no less would do"),
        ),
        Section(
            "Risk analysis and management",
            ("§ 164.308(a)(1)(ii)(A)", "§ 164.308(a)(1)(ii)(B)"),
            PROTECTED,
            ("the risk analysis, with its date", "measures chosen, and residual risk"),
        ),
        Section(
            "Review of activity, incidents",
            ("§ 164.308(a)(1)(ii)(D)", "§ 164.308(a)(6)"),
            INCIDENTS,
            ("who reviews, and how often", "incidents reported, and their outcome"),
        ),
        Section(
            "Access",
            ("§ 164.308(a)(3)", "§ 164.308(a)(4)", "§ 164.312(a)", "§ 164.312(d)"),
            ("participation", "admission"),
            ("persons with access, and how it is ended", "training of the workforce (§ 164.308(a)(5))"),
        ),
        Section(
            "Audit controls, integrity", ("§ 164.312(b)", "§ 164.312(c)"), (*AUDITED, "fingerprint", "state_hash"), ()
        ),
        Section("Transmission", ("§ 164.312(e)",), ("secure", "smallest_sum"), ("encryption on each way",)),
        Section("Contingency", ("§ 164.308(a)(7)",), ("retention",), ("backups, and a test of restoring them",)),
        Section(
            "Accounting of disclosures",
            ("§ 164.528",),
            ("updates", "sent_by", "site_sent", "forgotten"),
            ("whether an update is a disclosure", "requests of individuals"),
        ),
    ),
)

FORMS: dict[Kind, Form] = {"dpia": DPIA, "ai-act-annex-iv": ANNEX_IV, "hipaa": HIPAA}
