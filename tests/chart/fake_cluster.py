"""An API server that has custom resource definitions and a Deployment, for charts that look them up."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/"
DEPLOYMENTS = "/apis/apps/v1/namespaces/mr-system/deployments/"


@contextlib.contextmanager
def cluster(objects, existing, folder):
    """Serves the existing objects, and knows the kinds of the other ones. Yields the path of a kubeconfig."""
    kinds = {}
    for thing in objects:
        kinds.setdefault(thing["apiVersion"], set()).add((thing["kind"], "namespace" in thing["metadata"]))
    kinds.setdefault("apiextensions.k8s.io/v1", set()).add(("CustomResourceDefinition", False))
    kinds.setdefault("v1", set()).add(("Secret", True))
    folders = {"CustomResourceDefinition": DEFINITIONS, "Deployment": DEPLOYMENTS}
    answers = discovery(kinds) | {folders[thing["kind"]] + thing["metadata"]["name"]: thing for thing in existing}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            found = answers.get(self.path.split("?")[0])
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(found or missing).encode()
            self.send_response(200 if found else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        path = folder / "kubeconfig"
        path.write_text(json.dumps(kubeconfig(f"http://127.0.0.1:{server.server_port}")))
        yield path
    finally:
        server.shutdown()
        server.server_close()


def kubeconfig(server):
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "fake",
        "clusters": [{"name": "fake", "cluster": {"server": server}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
        "users": [{"name": "fake", "user": {}}],
    }


def discovery(kinds):
    """Returns what an API server with these kinds, by group and version, tells about itself."""
    answers = {
        "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
    }
    groups = {}
    for version, things in kinds.items():
        resources = [
            {"name": plural(kind), "singularName": "", "namespaced": spaced, "kind": kind, "verbs": ["get", "list"]}
            for kind, spaced in sorted(things)
        ]
        listed = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
        answers[f"/apis/{version}" if "/" in version else f"/api/{version}"] = listed
        if "/" in version:
            groups[version.split("/")[0]] = {"groupVersion": version, "version": version.split("/")[1]}
    listed = [{"name": group, "versions": [one], "preferredVersion": one} for group, one in groups.items()]
    answers["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
    return answers


def plural(kind):
    name = kind.lower()
    return name[:-1] + "ies" if name.endswith("y") else name + "s"
