BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL,
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0017');
CREATE TABLE audit_log (
	number INTEGER NOT NULL,
	at VARCHAR NOT NULL,
	actor VARCHAR NOT NULL,
	role VARCHAR NOT NULL,
	address VARCHAR NOT NULL,
	act VARCHAR NOT NULL,
	federation VARCHAR,
	federation_name VARCHAR,
	detail JSON NOT NULL,
	previous VARCHAR NOT NULL,
	hash VARCHAR NOT NULL,
	CONSTRAINT pk_audit_log PRIMARY KEY (number)
);
CREATE TABLE blobs (
	digest VARCHAR NOT NULL,
	content BLOB NOT NULL,
	CONSTRAINT pk_blobs PRIMARY KEY (digest)
);
CREATE TABLE clients (
	id VARCHAR NOT NULL,
	federation_id VARCHAR NOT NULL,
	name VARCHAR NOT NULL,
	role VARCHAR NOT NULL,
	secret_digest VARCHAR,
	num_samples INTEGER NOT NULL,
	class_names JSON NOT NULL,
	domain JSON,
	device VARCHAR NOT NULL,
	active BOOLEAN NOT NULL,
	joined BOOLEAN NOT NULL,
	enrolled_at VARCHAR NOT NULL,
	last_seen VARCHAR,
	refusals INTEGER NOT NULL,
	last_refusal JSON, token_id VARCHAR, identity_key VARCHAR, protection JSON,
	CONSTRAINT pk_clients PRIMARY KEY (id),
	CONSTRAINT fk_clients_federation_id FOREIGN KEY(federation_id) REFERENCES federations (id) ON DELETE CASCADE,
	CONSTRAINT uq_clients_federation_id_name UNIQUE (federation_id, name),
	CONSTRAINT uq_clients_federation_id_secret_digest UNIQUE (federation_id, secret_digest)
);
CREATE TABLE coordinators (
	id VARCHAR NOT NULL,
	url VARCHAR NOT NULL,
	seen DOUBLE NOT NULL,
	backend INTEGER,
	CONSTRAINT pk_coordinators PRIMARY KEY (id)
);
CREATE TABLE "enrolment_tokens" (
	digest VARCHAR NOT NULL,
	federation_id VARCHAR NOT NULL,
	created_at VARCHAR NOT NULL,
	expires_at VARCHAR NOT NULL,
	id VARCHAR NOT NULL,
	name VARCHAR NOT NULL,
	role VARCHAR,
	uses INTEGER,
	used INTEGER NOT NULL,
	client VARCHAR,
	closed BOOLEAN NOT NULL, expired_at VARCHAR,
	CONSTRAINT pk_enrolment_tokens PRIMARY KEY (digest),
	CONSTRAINT fk_enrolment_tokens_federation_id FOREIGN KEY(federation_id) REFERENCES federations (id) ON DELETE CASCADE,
	CONSTRAINT uq_enrolment_tokens_id UNIQUE (id),
	CONSTRAINT uq_enrolment_tokens_federation_id_name UNIQUE (federation_id, name)
);
CREATE TABLE evaluations (
	task_id VARCHAR NOT NULL,
	digest VARCHAR NOT NULL,
	body JSON NOT NULL,
	received_at VARCHAR NOT NULL,
	CONSTRAINT pk_evaluations PRIMARY KEY (task_id),
	CONSTRAINT fk_evaluations_task_id FOREIGN KEY(task_id) REFERENCES tasks (id) ON DELETE CASCADE
);
CREATE TABLE events (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
	federation_id VARCHAR NOT NULL,
	kind VARCHAR NOT NULL,
	data JSON NOT NULL,
	at VARCHAR NOT NULL,
	CONSTRAINT fk_events_federation_id FOREIGN KEY(federation_id) REFERENCES federations (id) ON DELETE CASCADE
);
CREATE TABLE exchanges (
	task_id VARCHAR NOT NULL,
	digest VARCHAR NOT NULL,
	body BLOB,
	bytes INTEGER NOT NULL,
	received_at VARCHAR NOT NULL, metrics JSON,
	CONSTRAINT pk_exchanges PRIMARY KEY (task_id),
	CONSTRAINT fk_exchanges_task_id_tasks FOREIGN KEY(task_id) REFERENCES tasks (id) ON DELETE CASCADE
);
CREATE TABLE federations (
	id VARCHAR NOT NULL,
	name VARCHAR NOT NULL,
	spec JSON NOT NULL,
	idempotency_key VARCHAR,
	request_digest VARCHAR NOT NULL,
	created_at VARCHAR NOT NULL,
	started_at VARCHAR,
	ended_at VARCHAR,
	state VARCHAR NOT NULL,
	reason VARCHAR,
	round INTEGER NOT NULL,
	step INTEGER NOT NULL,
	work VARCHAR,
	joining JSON NOT NULL,
	fingerprint VARCHAR,
	shape JSON,
	supplied_state VARCHAR, lexicon VARCHAR, draw_secret VARCHAR, noise_key VARCHAR, sampling_key VARCHAR, budget_rounds INTEGER,
	CONSTRAINT pk_federations PRIMARY KEY (id),
	CONSTRAINT uq_federations_idempotency_key UNIQUE (idempotency_key),
	CONSTRAINT uq_federations_name UNIQUE (name)
);
CREATE TABLE leases (
	federation_id VARCHAR NOT NULL,
	holder VARCHAR,
	epoch INTEGER NOT NULL,
	CONSTRAINT pk_leases PRIMARY KEY (federation_id),
	CONSTRAINT fk_leases_federation_id_federations FOREIGN KEY(federation_id) REFERENCES federations (id) ON DELETE CASCADE
);
CREATE TABLE objects (
	digest VARCHAR NOT NULL,
	"key" VARCHAR NOT NULL,
	CONSTRAINT pk_objects PRIMARY KEY (digest),
	CONSTRAINT uq_objects_key UNIQUE ("key")
);
CREATE TABLE operator_tokens (
	digest VARCHAR NOT NULL,
	id VARCHAR NOT NULL,
	name VARCHAR NOT NULL,
	role VARCHAR NOT NULL,
	created_at VARCHAR NOT NULL,
	expires_at VARCHAR NOT NULL, expired_at VARCHAR,
	CONSTRAINT pk_operator_tokens PRIMARY KEY (digest),
	CONSTRAINT uq_operator_tokens_id UNIQUE (id)
);
CREATE TABLE phases (
	id INTEGER NOT NULL,
	federation_id VARCHAR NOT NULL,
	round INTEGER NOT NULL,
	step INTEGER NOT NULL,
	kind VARCHAR NOT NULL,
	name VARCHAR NOT NULL,
	sample_size INTEGER NOT NULL,
	extended BOOLEAN NOT NULL,
	opened_at VARCHAR NOT NULL,
	deadline VARCHAR NOT NULL,
	closed_at VARCHAR,
	completed_at VARCHAR, measured JSON, expected DOUBLE, noise_key VARCHAR,
	CONSTRAINT pk_phases PRIMARY KEY (id),
	CONSTRAINT fk_phases_federation_id FOREIGN KEY(federation_id) REFERENCES federations (id) ON DELETE CASCADE,
	CONSTRAINT uq_phases_federation_id_round_step UNIQUE (federation_id, round, step)
);
CREATE TABLE states (
	id INTEGER NOT NULL,
	federation_id VARCHAR NOT NULL,
	round INTEGER NOT NULL,
	phase_id INTEGER,
	origin VARCHAR NOT NULL,
	state_hash VARCHAR NOT NULL,
	sha256 VARCHAR NOT NULL,
	bytes INTEGER NOT NULL,
	committed_at VARCHAR NOT NULL,
	stored BOOLEAN NOT NULL,
	CONSTRAINT pk_states PRIMARY KEY (id),
	CONSTRAINT fk_states_federation_id FOREIGN KEY(federation_id) REFERENCES federations (id) ON DELETE CASCADE,
	CONSTRAINT fk_states_phase_id FOREIGN KEY(phase_id) REFERENCES phases (id) ON DELETE CASCADE,
	CONSTRAINT uq_states_phase_id UNIQUE (phase_id)
);
CREATE TABLE store (
	id VARCHAR NOT NULL,
	CONSTRAINT pk_store PRIMARY KEY (id)
);
CREATE TABLE "sums" (
	phase_id INTEGER NOT NULL,
	sha256 VARCHAR NOT NULL,
	body BLOB NOT NULL,
	count INTEGER NOT NULL,
	weight DOUBLE NOT NULL,
	CONSTRAINT pk_sums PRIMARY KEY (phase_id),
	CONSTRAINT fk_sums_phase_id_phases FOREIGN KEY(phase_id) REFERENCES phases (id) ON DELETE CASCADE
);
CREATE TABLE tasks (
	id VARCHAR NOT NULL,
	federation_id VARCHAR NOT NULL,
	phase_id INTEGER NOT NULL,
	number INTEGER NOT NULL,
	client VARCHAR NOT NULL,
	status VARCHAR NOT NULL,
	opened_at VARCHAR NOT NULL,
	settled_at VARCHAR,
	payload_sha256 VARCHAR,
	payload_bytes INTEGER,
	payload_stored BOOLEAN NOT NULL,
	bytes_down INTEGER NOT NULL,
	failure JSON,
	counted BOOLEAN NOT NULL,
	weight DOUBLE,
	CONSTRAINT pk_tasks PRIMARY KEY (id),
	CONSTRAINT fk_tasks_federation_id FOREIGN KEY(federation_id) REFERENCES federations (id) ON DELETE CASCADE,
	CONSTRAINT fk_tasks_phase_id FOREIGN KEY(phase_id) REFERENCES phases (id) ON DELETE CASCADE
);
CREATE TABLE updates (
	task_id VARCHAR NOT NULL,
	sha256 VARCHAR NOT NULL,
	bytes INTEGER NOT NULL,
	norm DOUBLE NOT NULL,
	metrics JSON NOT NULL,
	received_at VARCHAR NOT NULL,
	stored BOOLEAN NOT NULL, judged JSON, receipt JSON,
	CONSTRAINT pk_updates PRIMARY KEY (task_id),
	CONSTRAINT fk_updates_task_id FOREIGN KEY(task_id) REFERENCES tasks (id) ON DELETE CASCADE
);
CREATE INDEX ix_events_federation_id_id ON events (federation_id, id);
CREATE INDEX ix_states_federation_id_round ON states (federation_id, round);
CREATE INDEX ix_states_sha256 ON states (sha256);
CREATE INDEX ix_tasks_federation_id ON tasks (federation_id);
CREATE INDEX ix_tasks_payload_sha256 ON tasks (payload_sha256);
CREATE INDEX ix_tasks_phase_id ON tasks (phase_id);
CREATE INDEX ix_updates_sha256 ON updates (sha256);
CREATE INDEX ix_enrolment_tokens_federation_id ON enrolment_tokens (federation_id);
CREATE INDEX ix_operator_tokens_name ON operator_tokens (name);
CREATE INDEX ix_audit_log_federation ON audit_log (federation);
CREATE INDEX ix_leases_holder ON leases (holder);
DELETE FROM "sqlite_sequence";
COMMIT;
