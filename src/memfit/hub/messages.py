"""What is said about the hubs, in English and in Chinese."""

from __future__ import annotations

from collections.abc import Mapping

MESSAGES: Mapping[str, Mapping[str, str]] = {
    "off": {
        "en": "is switched off (HF_HUB_OFFLINE=1)",
        "zh": "已关闭（HF_HUB_OFFLINE=1）",
    },
    "unreachable": {"en": "cannot be reached ({address})", "zh": "连不上（{address}）"},
    "nowhere": {
        "en": "cannot get the model {name}: there is no folder of that name, and the hub {why}; "
        "nor is it in the cache ({cache})",
        "zh": "无法获取模型 {name}：没有这个名字的文件夹，hub {why}；缓存（{cache}）里也没有",
    },
    "nowhere.modelscope": {
        "en": "cannot get the model modelscope:{name}: ModelScope {why}, and it is not in the "
        "cache ({cache})",
        "zh": "无法获取模型 modelscope:{name}：ModelScope {why}，缓存（{cache}）里也没有",
    },
    "stopped": {
        "en": "the download of {name} stopped: the connection failed with {bytes} of {file} "
        "fetched; the same command goes on there",
        "zh": "{name} 的下载停了：连接中断，{file} 已取得 {bytes}；再运行同一条命令会接着下载",
    },
    "doing.login": {"en": "log in", "zh": "登录"},
    "doing.login.modelscope": {"en": "log in to ModelScope", "zh": "登录 ModelScope"},
    "doing.who": {"en": "ask who is logged in", "zh": "查询登录用户"},
    "doing.who.modelscope": {
        "en": "ask who is logged in to ModelScope",
        "zh": "查询 ModelScope 的登录用户",
    },
    "doing.upload": {"en": "upload to {repo}", "zh": "上传到 {repo}"},
    "doing.get": {"en": "get the model {name}", "zh": "获取模型 {name}"},
    "token.refused": {
        "en": "cannot {doing}: the hub does not accept the token; log in with memfit login, or "
        "set HF_TOKEN",
        "zh": "无法{doing}：hub 不接受这个令牌；请用 memfit login 登录，或设置 HF_TOKEN",
    },
    "token.none": {
        "en": "cannot {doing}: the hub knows no token; log in with memfit login, or set HF_TOKEN",
        "zh": "无法{doing}：没有令牌；请用 memfit login 登录，或设置 HF_TOKEN",
    },
    "token.refused.login": {
        "en": "cannot {doing}: the hub does not accept the token",
        "zh": "无法{doing}：hub 不接受这个令牌",
    },
    "token.none.login": {
        "en": "cannot {doing}: the hub knows no token",
        "zh": "无法{doing}：没有令牌",
    },
    "token.weak": {
        "en": "cannot {doing}: the token may not write there; make one that may "
        "({address}/settings/tokens) and log in again with memfit login --force",
        "zh": "无法{doing}：这个令牌没有写权限；请在 {address}/settings/tokens 新建一个可写的，"
        "再用 memfit login --force 登录",
    },
    "failed": {
        "en": "cannot {doing}: the connection to {address} failed",
        "zh": "无法{doing}：与 {address} 的连接失败",
    },
    "failed.again": {
        "en": "cannot {doing}: the connection to {address} failed; the same command goes on where "
        "it stopped",
        "zh": "无法{doing}：与 {address} 的连接失败；再运行同一条命令会接着做",
    },
    "failed.reason": {"en": "cannot {doing}: {reason}", "zh": "无法{doing}：{reason}"},
    "refused.modelscope": {
        "en": "cannot {doing}: your token may not do that on ModelScope",
        "zh": "无法{doing}：你的令牌在 ModelScope 上没有这个权限",
    },
    "none.modelscope": {
        "en": "cannot {doing}: ModelScope has none of that name",
        "zh": "无法{doing}：ModelScope 上没有这个名字",
    },
    "public": {
        "en": "{repo} exists already and is public, so that nothing was uploaded; make it "
        "private in its settings, or name another repository",
        "zh": "{repo} 已存在且是公开的，因此什么也没有上传；请在它的设置里改为私有，或换一个仓库",
    },
    "switched.off": {
        "en": "the hub is switched off (HF_HUB_OFFLINE=1); take that out of the environment first",
        "zh": "hub 已关闭（HF_HUB_OFFLINE=1）；请先去掉这个环境变量",
    },
    "licence.none": {
        "en": "no licence given; name one with --licence, for instance --licence {first} (or "
        "{others})",
        "zh": "没有给出许可证；请用 --licence 指明，例如 --licence {first}（或 {others}）",
    },
    "licence.unknown": {
        "en": "--licence is {name}, which the hubs do not know.{hint} Write other for one of your "
        "own",
        "zh": "--licence 是 {name}，hub 不认识。{hint}自拟的许可证请写 other",
    },
    "repo.letters": {
        "en": "the repository {repo} may hold letters, digits, '-', '_' and '.' only",
        "zh": "仓库 {repo} 只能含有字母、数字、'-'、'_' 和 '.'",
    },
    "folder.none": {
        "en": "there is no folder {folder}; give the output folder of a run",
        "zh": "没有文件夹 {folder}；请给出一次训练的输出文件夹",
    },
    "folder.tokenizer": {
        "en": "the folder {folder} has no tokenizer, and a model without one is of no use to "
        "others; write it there with tokenizer.save_pretrained({path})",
        "zh": "文件夹 {folder} 里没有分词器，别人没法用这样的模型；"
        "请用 tokenizer.save_pretrained({path}) 写进去",
    },
    "name.modelscope": {
        "en": "modelscope:{name} is not of the form modelscope:org/name",
        "zh": "modelscope:{name} 不是 modelscope:组织/名称 的形式",
    },
    "token.modelscope": {
        "en": "no token given; make one at https://modelscope.cn/my/myaccesstoken and paste it "
        "into memfit login --to modelscope, or set MODELSCOPE_API_TOKEN",
        "zh": "没有给出令牌；请在 https://modelscope.cn/my/myaccesstoken 新建一个，粘贴到 "
        "memfit login --to modelscope，或设置 MODELSCOPE_API_TOKEN",
    },
    "token.refused.modelscope": {
        "en": "cannot {doing}: ModelScope does not accept the token; log in with memfit login --to "
        "modelscope, or set MODELSCOPE_API_TOKEN",
        "zh": "无法{doing}：ModelScope 不接受这个令牌；请用 memfit login --to modelscope 登录，"
        "或设置 MODELSCOPE_API_TOKEN",
    },
    "token.refused.modelscope.login": {
        "en": "cannot {doing}: ModelScope does not accept the token",
        "zh": "无法{doing}：ModelScope 不接受这个令牌",
    },
    "login.modelscope": {
        "en": "cannot upload to {repo}: not logged in to ModelScope; log in with memfit login --to "
        "modelscope, or set MODELSCOPE_API_TOKEN",
        "zh": "无法上传到 {repo}：没有登录 ModelScope；请用 memfit login --to modelscope 登录，"
        "或设置 MODELSCOPE_API_TOKEN",
    },
    "client.modelscope": {
        "en": "ModelScope needs its client, which is not installed: {command}",
        "zh": "ModelScope 需要它的客户端，这里没有安装：{command}",
    },
    "repo.form": {
        "en": "the repository {repo} is not of the form user/name",
        "zh": "仓库 {repo} 不是 用户/名称 的形式",
    },
    "uploaded": {
        "en": "uploaded {count} files ({size}) to {url}",
        "zh": "已上传 {count} 个文件（{size}）到 {url}",
    },
    "logged.in": {"en": "logged in to {hub} as {user}", "zh": "已登录 {hub}，用户 {user}"},
}
