-- KEYS[1] meta  [2] flows  [3] sizes  [4] ended  [5] buckets  [6] recent  [7] evicted
-- ARGV[1] now, ms  [2] limit  [3] prefix of other keys
-- Returns the checkpoint and, if there is one, the ids.
local found = mark()
if not found[2] then
  return found
end
local limit = tonumber(ARGV[2])
for i, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', ARGV[1], 'LIMIT', 0, limit)) do
  found[2 + i] = id
end

-- Of the evicted jobs, those of the oldest log, if it is complete: 2^18 ms per log.
local log = redis.call('ZRANGE', KEYS[7], 0, 0)[1]
local room = limit - (#found - 2)
if room > 0 and log and (tonumber(log) + 1) * 262144 <= tonumber(ARGV[1]) then
  local key = ARGV[3] .. 'evicted:' .. log
  local ids = redis.call('LRANGE', key, 0, room - 1)
  if #ids == 0 then
    return without_mark()
  end
  local outdated, is_first = 0, true
  for _, id in ipairs(ids) do
    if redis.call('HEXISTS', ARGV[3] .. 'job:' .. bucket_of(id), id) == 0 then
      found[#found + 1] = id
      is_first = false
    elseif is_first then
      -- The job has a record again, because a batch was applied a second time.
      outdated = outdated + 1
    end
  end
  if outdated > 0 then
    redis.call('LTRIM', key, outdated, -1)
    if redis.call('EXISTS', key) == 0 then
      redis.call('ZREM', KEYS[7], log)
      redis.call('HSET', KEYS[1], 'counts', counts())
    end
  end
end
return found
