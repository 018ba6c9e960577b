# Images from one file, by `docker build --target NAME .`; compose builds `coordinator` and `client`:
#   coordinator        without torch
#   coordinator-torch  with torch, for the federations that need it: docs/guides/containers.md says which
#   client             with torch; it shares torch's layer with coordinator-torch
#   serve              an export over HTTP, on top of client
# Dependencies come before code, so that a change of code installs nothing again.

FROM python:3.11-slim AS services
ENV PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# One more package index, such as PyTorch's of CPU wheels, which make images with torch a fifth of the size. The image's
# history keeps it: an address with a password does not belong here.
ARG PIP_EXTRA_INDEX_URL=""
# A fixed number, so that the owner of a mounted folder can let it in.
RUN groupadd --gid 10001 promptfed \
    && useradd --uid 10001 --gid 10001 --home-dir /app --no-log-init --shell /usr/sbin/nologin promptfed \
    # A new volume takes the owner of the folder in the image that it is mounted on.
    && install -d --owner promptfed --group promptfed --mode 0700 /data /state /join
WORKDIR /app
COPY constraints.txt requirements/services.txt requirements/
COPY requirements/locked requirements/locked
# Every file is the one whose hash stands in the lock (`make lock`). Another index has other files under the same
# versions, such as PyTorch's wheels for CPUs: where one is given, versions alone are fixed.
RUN printf '%s\n' '#!/bin/sh -e' \
    'if [ -n "$PIP_EXTRA_INDEX_URL" ]; then shift; exec pip install -c requirements/constraints.txt "$@"; fi' \
    'exec pip install --require-hashes -r "requirements/locked/$1.txt"' > /usr/local/bin/install-locked \
    && chmod 755 /usr/local/bin/install-locked
RUN --mount=type=cache,target=/root/.cache/pip \
    install-locked services -r requirements/services.txt \
    # 45 MB of tests, which nothing imports
    && find $(python -c 'import numpy, scipy; print(*numpy.__path__, *scipy.__path__)') -type d -name tests -prune -exec rm -r {} +
# PROBE is the port and path that an image answers with 200 when it is well.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --start-interval=1s CMD ["python", "-c", \
    "import http.client as c, os; port, path = os.environ['PROBE'].split(); s = c.HTTPConnection('127.0.0.1', int(port), timeout=4); s.request('GET', path); exit(s.getresponse().status != 200)"]

FROM services AS torch
COPY requirements/torch.txt requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    install-locked torch -r requirements/torch.txt

FROM services AS coordinator-code
COPY promptfed/__init__.py promptfed/
COPY shared promptfed/shared
COPY coordinator promptfed/coordinator
# A coordinator runs no backbone and reads no images: it needs neither weights nor embedded data.
RUN rm -r promptfed/shared/clip/*/*.safetensors promptfed/shared/data/embedded promptfed/shared/data/emoji/embedded \
    && python -m compileall -q promptfed

FROM services AS coordinator
COPY requirements/coordinator.txt requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    install-locked coordinator -r requirements/coordinator.txt 'psycopg[binary]' obstore
COPY --from=coordinator-code /app/promptfed promptfed
USER 10001:10001
ENV PROMPTFED_COORDINATOR_DATA_DIR=/data PROBE="8080 /readyz"
EXPOSE 8080
ENTRYPOINT ["python", "-m", "promptfed.coordinator"]

FROM torch AS coordinator-torch
COPY requirements/coordinator.txt requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    install-locked coordinator -r requirements/coordinator.txt 'psycopg[binary]' obstore
COPY --from=coordinator-code /app/promptfed promptfed
USER 10001:10001
ENV PROMPTFED_COORDINATOR_DATA_DIR=/data PROBE="8080 /readyz"
EXPOSE 8080
ENTRYPOINT ["python", "-m", "promptfed.coordinator"]

FROM torch AS client
COPY requirements/client.txt requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    install-locked client -r requirements/client.txt
COPY promptfed/__init__.py promptfed/
COPY shared promptfed/shared
COPY client_service promptfed/client_service
RUN python -m compileall -q promptfed
USER 10001:10001
# What libraries keep at home, such as weights that open_clip downloads, is kept with the client's state.
ENV HOME=/state \
    PROMPTFED_CLIENT_STATE_DIR=/state \
    PROMPTFED_CLIENT_ENROLMENT_TOKEN_FILE=/join/enrolment.token \
    PROMPTFED_CLIENT_API_PORT=8081 \
    PROBE="8081 /healthz"
ENTRYPOINT ["python", "-m", "promptfed.client_service"]

FROM client AS serve
USER root
COPY requirements/command.txt requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    install-locked serve -r requirements/command.txt
COPY promptfed/__main__.py promptfed/
COPY coordinator promptfed/coordinator
COPY promptfed/console promptfed/console
COPY promptfed/sdk promptfed/sdk
COPY promptfed/runtime promptfed/runtime
COPY promptfed/export promptfed/export
COPY promptfed/experiments promptfed/experiments
COPY promptfed/cli promptfed/cli
RUN python -m compileall -q promptfed
USER 10001:10001
ENV PROBE="8082 /healthz"
EXPOSE 8082
ENTRYPOINT ["python", "-m", "promptfed", "serve", "/export", "--host", "0.0.0.0", "--token-file", "/run/secrets/token"]
