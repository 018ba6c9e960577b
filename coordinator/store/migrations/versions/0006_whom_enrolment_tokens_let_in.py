"""Whom enrolment tokens let in"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from promptfed.coordinator.store.tables import Text, Whole

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """To this version. Tokens that there are stay as they were minted: for as many clients as come."""
    with op.batch_alter_table("enrolment_tokens") as table:
        table.add_column(sa.Column("id", Text, nullable=True))
        table.add_column(sa.Column("name", Text, nullable=True))
        table.add_column(sa.Column("role", Text, nullable=True))
        table.add_column(sa.Column("uses", Whole, nullable=True))
        table.add_column(sa.Column("used", Whole, nullable=False, server_default="0"))
        table.add_column(sa.Column("client", Text, nullable=True))
        table.add_column(sa.Column("closed", sa.Boolean, nullable=False, server_default=sa.false()))
    op.execute(
        "UPDATE enrolment_tokens SET id = 'tok-' || substr(digest, 1, 16), name = 'tok-' || substr(digest, 1, 16)"
    )
    with op.batch_alter_table("enrolment_tokens") as table:
        table.alter_column("id", existing_type=Text, nullable=False)
        table.alter_column("name", existing_type=Text, nullable=False)
        table.alter_column("used", existing_type=Whole, server_default=None)
        table.alter_column("closed", existing_type=sa.Boolean(), server_default=None)
        table.create_unique_constraint(op.f("uq_enrolment_tokens_id"), ["id"])
        table.create_unique_constraint(op.f("uq_enrolment_tokens_federation_id_name"), ["federation_id", "name"])
    op.add_column("clients", sa.Column("token_id", Text, nullable=True))


def downgrade() -> None:
    """Back from it."""
    op.drop_column("clients", "token_id")
    with op.batch_alter_table("enrolment_tokens") as table:
        table.drop_constraint(op.f("uq_enrolment_tokens_federation_id_name"), type_="unique")
        table.drop_constraint(op.f("uq_enrolment_tokens_id"), type_="unique")
        for name in ("closed", "client", "used", "uses", "role", "name", "id"):
            table.drop_column(name)
