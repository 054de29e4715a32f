# docker build -t llmref . && docker run -p 8000:8000 -v llmref:/data -e LLMREF_API_KEY=... llmref
FROM python:3.13-slim AS build
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:3.13-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[fast,zstd]" && rm -r /wheels \
    && useradd --create-home llmref && install -d -o llmref /data
USER llmref
# The model, the compiled kernels and the store outlive the container.
ENV LLMREF_CACHE=/data/cache PYTHONUNBUFFERED=1
VOLUME /data
EXPOSE 8000
HEALTHCHECK --start-period=180s CMD ["python", "-c", \
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health/live', timeout=5)"]
# exec form: SIGTERM reaches the server, which gives running requests --shutdown-grace seconds
ENTRYPOINT ["llmref", "--host", "0.0.0.0", "--store", "/data/responses.db"]
