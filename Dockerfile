# Two images from one file: `docker build --target coordinator .` and `--target client .`; compose builds both.
# Dependencies come before code, so that a change of code installs nothing again, and both share the layer with torch.

FROM python:3.11-slim AS services
ENV PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# One more package index, such as PyTorch's of CPU wheels, which make images a fifth of the size. The image's history
# keeps it: an address with a password does not belong here.
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
    install-locked services -r requirements/services.txt

FROM services AS coordinator
COPY requirements/coordinator.txt requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    install-locked coordinator -r requirements/coordinator.txt 'psycopg[binary]' obstore
COPY promptfed/__init__.py promptfed/
COPY shared promptfed/shared
COPY coordinator promptfed/coordinator
USER 10001:10001
ENV PROMPTFED_COORDINATOR_DATA_DIR=/data
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --start-interval=1s CMD ["python", "-c", \
    "import http.client as c; s = c.HTTPConnection('127.0.0.1', 8080, timeout=4); s.request('GET', '/readyz'); exit(s.getresponse().status != 200)"]
ENTRYPOINT ["python", "-m", "promptfed.coordinator"]

FROM services AS client
COPY requirements/client.txt requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    install-locked client -r requirements/client.txt
COPY promptfed/__init__.py promptfed/
COPY shared promptfed/shared
COPY client_service promptfed/client_service
USER 10001:10001
# What libraries keep at home, such as weights that open_clip downloads, is kept with the client's state.
ENV HOME=/state \
    PROMPTFED_CLIENT_STATE_DIR=/state \
    PROMPTFED_CLIENT_ENROLMENT_TOKEN_FILE=/join/enrolment.token \
    PROMPTFED_CLIENT_API_PORT=8081
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --start-interval=1s CMD ["python", "-c", \
    "import http.client as c; s = c.HTTPConnection('127.0.0.1', 8081, timeout=4); s.request('GET', '/healthz'); exit(s.getresponse().status != 200)"]
ENTRYPOINT ["python", "-m", "promptfed.client_service"]
