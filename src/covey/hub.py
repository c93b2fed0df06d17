"""The Hugging Face hub, or whatever `HF_ENDPOINT` names, through `huggingface_hub`: is it there; uploads to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError  # type: ignore[attr-defined]
from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

from covey.errors import HubError
from covey.files import COMPLETE

_FIXES = {
    401: "log in with `hf auth login`, or set HF_TOKEN to a token that may write",
    403: "the token may not write there; use one that may, or another name",
    404: "there is no such place, or the token may not see it; check the name",
}


def out_of_reach(model: str) -> Exception | None:
    """Why a model that is not here cannot be asked for, None = it may be; transformers would try each of its files for
    half a minute.
    """
    try:
        if not constants.HF_HUB_OFFLINE and try_to_load_from_cache(model, "config.json") is None:
            get_session().head(constants.ENDPOINT, timeout=10)
    except (HFValidationError, HTTPError) as error:
        return error
    return None


def prepare_upload(repository: str, *, token: str | None = None, private: bool | None = None) -> str:
    """Make sure that a model repository is there and that it may be written, before anything expensive.

    Raises `HubError`: it cannot be made or reached, or the token may not write.
    """
    with _explained(repository):
        return str(HfApi(token=token).create_repo(repository, private=private, exist_ok=True).repo_id)


def upload_folder(
    folder: str | Path,
    repository: str,
    *,
    message: str = "Upload a model trained with Covey",
    token: str | None = None,
    revision: str | None = None,
) -> str:
    """Upload the files of a folder, as one commit.

    Raises `HubError`: it cannot be uploaded; the folder is as it was.
    """
    api = HfApi(token=token)
    ignored = [COMPLETE, "covey/**", "covey-*/**", "checkpoint-*/**", "*.tmp-*", "*.tmp-*/**"]
    with _explained(repository, f"; nothing is lost, {folder} has all of it"):
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        done = api.upload_folder(
            folder_path=folder, repo_id=repository, commit_message=message, revision=revision, ignore_patterns=ignored
        )
    return str(done.commit_url)


@contextmanager
def _explained(repository: str, kept: str = "") -> Iterator[None]:
    def said(error: Exception, text: object = None) -> str:
        return (str(text or error).strip().splitlines() or [type(error).__name__])[0][:200]

    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        told, fix = said(error, error.server_message), _FIXES.get(status or 0, "try again")
        raise HubError(f"{repository}: the hub refuses ({status}: {told}); {fix}{kept}") from error
    except HFValidationError as error:
        raise HubError(f"{repository!r:.200}: is not a name of a repository; give OWNER/NAME{kept}") from error
    except (HTTPError, OSError) as error:
        fix = f"check the network, HF_ENDPOINT and HF_HUB_OFFLINE{kept}"
        raise HubError(f"{repository}: the hub cannot be reached ({said(error)}); {fix}") from error
