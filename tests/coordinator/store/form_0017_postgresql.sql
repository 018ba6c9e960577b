CREATE TABLE alembic_version (
    version_num character varying(32) NOT NULL
);
CREATE TABLE audit_log (
    number bigint NOT NULL,
    at character varying NOT NULL COLLATE pg_catalog."C",
    actor character varying NOT NULL COLLATE pg_catalog."C",
    role character varying NOT NULL COLLATE pg_catalog."C",
    address character varying NOT NULL COLLATE pg_catalog."C",
    act character varying NOT NULL COLLATE pg_catalog."C",
    federation character varying COLLATE pg_catalog."C",
    federation_name character varying COLLATE pg_catalog."C",
    detail json NOT NULL,
    previous character varying NOT NULL COLLATE pg_catalog."C",
    hash character varying NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE blobs (
    digest character varying NOT NULL COLLATE pg_catalog."C",
    content bytea NOT NULL
);
ALTER TABLE ONLY blobs ALTER COLUMN content SET STORAGE EXTERNAL;
CREATE TABLE clients (
    id character varying NOT NULL COLLATE pg_catalog."C",
    federation_id character varying NOT NULL COLLATE pg_catalog."C",
    name character varying NOT NULL COLLATE pg_catalog."C",
    role character varying NOT NULL COLLATE pg_catalog."C",
    secret_digest character varying COLLATE pg_catalog."C",
    num_samples bigint NOT NULL,
    class_names json NOT NULL,
    domain json,
    device character varying NOT NULL COLLATE pg_catalog."C",
    active boolean NOT NULL,
    joined boolean NOT NULL,
    enrolled_at character varying NOT NULL COLLATE pg_catalog."C",
    last_seen character varying COLLATE pg_catalog."C",
    refusals bigint NOT NULL,
    last_refusal json,
    token_id character varying COLLATE pg_catalog."C",
    identity_key character varying COLLATE pg_catalog."C",
    protection json
);
CREATE TABLE coordinators (
    id character varying NOT NULL COLLATE pg_catalog."C",
    url character varying NOT NULL COLLATE pg_catalog."C",
    seen double precision NOT NULL,
    backend bigint
);
CREATE TABLE enrolment_tokens (
    digest character varying NOT NULL COLLATE pg_catalog."C",
    federation_id character varying NOT NULL COLLATE pg_catalog."C",
    created_at character varying NOT NULL COLLATE pg_catalog."C",
    expires_at character varying NOT NULL COLLATE pg_catalog."C",
    id character varying NOT NULL COLLATE pg_catalog."C",
    name character varying NOT NULL COLLATE pg_catalog."C",
    role character varying COLLATE pg_catalog."C",
    uses bigint,
    used bigint NOT NULL,
    client character varying COLLATE pg_catalog."C",
    closed boolean NOT NULL,
    expired_at character varying COLLATE pg_catalog."C"
);
CREATE TABLE evaluations (
    task_id character varying NOT NULL COLLATE pg_catalog."C",
    digest character varying NOT NULL COLLATE pg_catalog."C",
    body json NOT NULL,
    received_at character varying NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE events (
    id bigint NOT NULL,
    federation_id character varying NOT NULL COLLATE pg_catalog."C",
    kind character varying NOT NULL COLLATE pg_catalog."C",
    data json NOT NULL,
    at character varying NOT NULL COLLATE pg_catalog."C"
);
CREATE SEQUENCE events_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE events_id_seq OWNED BY events.id;
CREATE TABLE exchanges (
    task_id character varying NOT NULL COLLATE pg_catalog."C",
    digest character varying NOT NULL COLLATE pg_catalog."C",
    body bytea,
    bytes bigint NOT NULL,
    received_at character varying NOT NULL COLLATE pg_catalog."C",
    metrics json
);
CREATE TABLE federations (
    id character varying NOT NULL COLLATE pg_catalog."C",
    name character varying NOT NULL COLLATE pg_catalog."C",
    spec json NOT NULL,
    idempotency_key character varying COLLATE pg_catalog."C",
    request_digest character varying NOT NULL COLLATE pg_catalog."C",
    created_at character varying NOT NULL COLLATE pg_catalog."C",
    started_at character varying COLLATE pg_catalog."C",
    ended_at character varying COLLATE pg_catalog."C",
    state character varying NOT NULL COLLATE pg_catalog."C",
    reason character varying COLLATE pg_catalog."C",
    round bigint NOT NULL,
    step bigint NOT NULL,
    work character varying COLLATE pg_catalog."C",
    joining json NOT NULL,
    fingerprint character varying COLLATE pg_catalog."C",
    shape json,
    supplied_state character varying COLLATE pg_catalog."C",
    lexicon character varying COLLATE pg_catalog."C",
    draw_secret character varying COLLATE pg_catalog."C",
    noise_key character varying COLLATE pg_catalog."C",
    sampling_key character varying COLLATE pg_catalog."C",
    budget_rounds bigint
);
CREATE TABLE leases (
    federation_id character varying NOT NULL COLLATE pg_catalog."C",
    holder character varying COLLATE pg_catalog."C",
    epoch bigint NOT NULL
);
CREATE TABLE objects (
    digest character varying NOT NULL COLLATE pg_catalog."C",
    key character varying NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE operator_tokens (
    digest character varying NOT NULL COLLATE pg_catalog."C",
    id character varying NOT NULL COLLATE pg_catalog."C",
    name character varying NOT NULL COLLATE pg_catalog."C",
    role character varying NOT NULL COLLATE pg_catalog."C",
    created_at character varying NOT NULL COLLATE pg_catalog."C",
    expires_at character varying NOT NULL COLLATE pg_catalog."C",
    expired_at character varying COLLATE pg_catalog."C"
);
CREATE TABLE phases (
    id bigint NOT NULL,
    federation_id character varying NOT NULL COLLATE pg_catalog."C",
    round bigint NOT NULL,
    step bigint NOT NULL,
    kind character varying NOT NULL COLLATE pg_catalog."C",
    name character varying NOT NULL COLLATE pg_catalog."C",
    sample_size bigint NOT NULL,
    extended boolean NOT NULL,
    opened_at character varying NOT NULL COLLATE pg_catalog."C",
    deadline character varying NOT NULL COLLATE pg_catalog."C",
    closed_at character varying COLLATE pg_catalog."C",
    completed_at character varying COLLATE pg_catalog."C",
    measured json,
    expected double precision,
    noise_key character varying COLLATE pg_catalog."C"
);
CREATE SEQUENCE phases_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE phases_id_seq OWNED BY phases.id;
CREATE TABLE states (
    id bigint NOT NULL,
    federation_id character varying NOT NULL COLLATE pg_catalog."C",
    round bigint NOT NULL,
    phase_id bigint,
    origin character varying NOT NULL COLLATE pg_catalog."C",
    state_hash character varying NOT NULL COLLATE pg_catalog."C",
    sha256 character varying NOT NULL COLLATE pg_catalog."C",
    bytes bigint NOT NULL,
    committed_at character varying NOT NULL COLLATE pg_catalog."C",
    stored boolean NOT NULL
);
CREATE SEQUENCE states_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE states_id_seq OWNED BY states.id;
CREATE TABLE store (
    id character varying NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE sums (
    phase_id bigint NOT NULL,
    sha256 character varying NOT NULL COLLATE pg_catalog."C",
    body bytea NOT NULL,
    count bigint NOT NULL,
    weight double precision NOT NULL
);
CREATE TABLE tasks (
    id character varying NOT NULL COLLATE pg_catalog."C",
    federation_id character varying NOT NULL COLLATE pg_catalog."C",
    phase_id bigint NOT NULL,
    number bigint NOT NULL,
    client character varying NOT NULL COLLATE pg_catalog."C",
    status character varying NOT NULL COLLATE pg_catalog."C",
    opened_at character varying NOT NULL COLLATE pg_catalog."C",
    settled_at character varying COLLATE pg_catalog."C",
    payload_sha256 character varying COLLATE pg_catalog."C",
    payload_bytes bigint,
    payload_stored boolean NOT NULL,
    bytes_down bigint NOT NULL,
    failure json,
    counted boolean NOT NULL,
    weight double precision
);
CREATE TABLE updates (
    task_id character varying NOT NULL COLLATE pg_catalog."C",
    sha256 character varying NOT NULL COLLATE pg_catalog."C",
    bytes bigint NOT NULL,
    norm double precision NOT NULL,
    metrics json NOT NULL,
    received_at character varying NOT NULL COLLATE pg_catalog."C",
    stored boolean NOT NULL,
    judged json,
    receipt json
);
ALTER TABLE ONLY events ALTER COLUMN id SET DEFAULT nextval('events_id_seq'::regclass);
ALTER TABLE ONLY phases ALTER COLUMN id SET DEFAULT nextval('phases_id_seq'::regclass);
ALTER TABLE ONLY states ALTER COLUMN id SET DEFAULT nextval('states_id_seq'::regclass);
INSERT INTO alembic_version VALUES ('0017');
SELECT pg_catalog.setval('events_id_seq', 1, false);
SELECT pg_catalog.setval('phases_id_seq', 1, false);
SELECT pg_catalog.setval('states_id_seq', 1, false);
ALTER TABLE ONLY alembic_version
    ADD CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num);
ALTER TABLE ONLY audit_log
    ADD CONSTRAINT pk_audit_log PRIMARY KEY (number);
ALTER TABLE ONLY blobs
    ADD CONSTRAINT pk_blobs PRIMARY KEY (digest);
ALTER TABLE ONLY clients
    ADD CONSTRAINT pk_clients PRIMARY KEY (id);
ALTER TABLE ONLY coordinators
    ADD CONSTRAINT pk_coordinators PRIMARY KEY (id);
ALTER TABLE ONLY enrolment_tokens
    ADD CONSTRAINT pk_enrolment_tokens PRIMARY KEY (digest);
ALTER TABLE ONLY evaluations
    ADD CONSTRAINT pk_evaluations PRIMARY KEY (task_id);
ALTER TABLE ONLY events
    ADD CONSTRAINT pk_events PRIMARY KEY (id);
ALTER TABLE ONLY exchanges
    ADD CONSTRAINT pk_exchanges PRIMARY KEY (task_id);
ALTER TABLE ONLY federations
    ADD CONSTRAINT pk_federations PRIMARY KEY (id);
ALTER TABLE ONLY leases
    ADD CONSTRAINT pk_leases PRIMARY KEY (federation_id);
ALTER TABLE ONLY objects
    ADD CONSTRAINT pk_objects PRIMARY KEY (digest);
ALTER TABLE ONLY operator_tokens
    ADD CONSTRAINT pk_operator_tokens PRIMARY KEY (digest);
ALTER TABLE ONLY phases
    ADD CONSTRAINT pk_phases PRIMARY KEY (id);
ALTER TABLE ONLY states
    ADD CONSTRAINT pk_states PRIMARY KEY (id);
ALTER TABLE ONLY store
    ADD CONSTRAINT pk_store PRIMARY KEY (id);
ALTER TABLE ONLY sums
    ADD CONSTRAINT pk_sums PRIMARY KEY (phase_id);
ALTER TABLE ONLY tasks
    ADD CONSTRAINT pk_tasks PRIMARY KEY (id);
ALTER TABLE ONLY updates
    ADD CONSTRAINT pk_updates PRIMARY KEY (task_id);
ALTER TABLE ONLY clients
    ADD CONSTRAINT uq_clients_federation_id_name UNIQUE (federation_id, name);
ALTER TABLE ONLY clients
    ADD CONSTRAINT uq_clients_federation_id_secret_digest UNIQUE (federation_id, secret_digest);
ALTER TABLE ONLY enrolment_tokens
    ADD CONSTRAINT uq_enrolment_tokens_federation_id_name UNIQUE (federation_id, name);
ALTER TABLE ONLY enrolment_tokens
    ADD CONSTRAINT uq_enrolment_tokens_id UNIQUE (id);
ALTER TABLE ONLY federations
    ADD CONSTRAINT uq_federations_idempotency_key UNIQUE (idempotency_key);
ALTER TABLE ONLY federations
    ADD CONSTRAINT uq_federations_name UNIQUE (name);
ALTER TABLE ONLY objects
    ADD CONSTRAINT uq_objects_key UNIQUE (key);
ALTER TABLE ONLY operator_tokens
    ADD CONSTRAINT uq_operator_tokens_id UNIQUE (id);
ALTER TABLE ONLY phases
    ADD CONSTRAINT uq_phases_federation_id_round_step UNIQUE (federation_id, round, step);
ALTER TABLE ONLY states
    ADD CONSTRAINT uq_states_phase_id UNIQUE (phase_id);
CREATE INDEX ix_audit_log_federation ON audit_log USING btree (federation);
CREATE INDEX ix_enrolment_tokens_federation_id ON enrolment_tokens USING btree (federation_id);
CREATE INDEX ix_events_federation_id_id ON events USING btree (federation_id, id);
CREATE INDEX ix_leases_holder ON leases USING btree (holder);
CREATE INDEX ix_operator_tokens_name ON operator_tokens USING btree (name);
CREATE INDEX ix_states_federation_id_round ON states USING btree (federation_id, round);
CREATE INDEX ix_states_sha256 ON states USING btree (sha256);
CREATE INDEX ix_tasks_federation_id ON tasks USING btree (federation_id);
CREATE INDEX ix_tasks_payload_sha256 ON tasks USING btree (payload_sha256);
CREATE INDEX ix_tasks_phase_id ON tasks USING btree (phase_id);
CREATE INDEX ix_updates_sha256 ON updates USING btree (sha256);
ALTER TABLE ONLY clients
    ADD CONSTRAINT fk_clients_federation_id FOREIGN KEY (federation_id) REFERENCES federations(id) ON DELETE CASCADE;
ALTER TABLE ONLY enrolment_tokens
    ADD CONSTRAINT fk_enrolment_tokens_federation_id FOREIGN KEY (federation_id) REFERENCES federations(id) ON DELETE CASCADE;
ALTER TABLE ONLY evaluations
    ADD CONSTRAINT fk_evaluations_task_id FOREIGN KEY (task_id) REFERENCES tasks(id) ON DELETE CASCADE;
ALTER TABLE ONLY events
    ADD CONSTRAINT fk_events_federation_id FOREIGN KEY (federation_id) REFERENCES federations(id) ON DELETE CASCADE;
ALTER TABLE ONLY exchanges
    ADD CONSTRAINT fk_exchanges_task_id_tasks FOREIGN KEY (task_id) REFERENCES tasks(id) ON DELETE CASCADE;
ALTER TABLE ONLY leases
    ADD CONSTRAINT fk_leases_federation_id_federations FOREIGN KEY (federation_id) REFERENCES federations(id) ON DELETE CASCADE;
ALTER TABLE ONLY phases
    ADD CONSTRAINT fk_phases_federation_id FOREIGN KEY (federation_id) REFERENCES federations(id) ON DELETE CASCADE;
ALTER TABLE ONLY states
    ADD CONSTRAINT fk_states_federation_id FOREIGN KEY (federation_id) REFERENCES federations(id) ON DELETE CASCADE;
ALTER TABLE ONLY states
    ADD CONSTRAINT fk_states_phase_id FOREIGN KEY (phase_id) REFERENCES phases(id) ON DELETE CASCADE;
ALTER TABLE ONLY sums
    ADD CONSTRAINT fk_sums_phase_id_phases FOREIGN KEY (phase_id) REFERENCES phases(id) ON DELETE CASCADE;
ALTER TABLE ONLY tasks
    ADD CONSTRAINT fk_tasks_federation_id FOREIGN KEY (federation_id) REFERENCES federations(id) ON DELETE CASCADE;
ALTER TABLE ONLY tasks
    ADD CONSTRAINT fk_tasks_phase_id FOREIGN KEY (phase_id) REFERENCES phases(id) ON DELETE CASCADE;
ALTER TABLE ONLY updates
    ADD CONSTRAINT fk_updates_task_id FOREIGN KEY (task_id) REFERENCES tasks(id) ON DELETE CASCADE;
